"""A model cut into stages, and one update of it.

``build_pipeline`` decides and cuts, before any other switch; ``attach`` puts the gates around all
other overlays; ``run`` is an update: shapes, schedule, sums over replicas and over holders of one
parameter. Gradients are left as *sums* over the micro-batches; the division by the total weight,
which only the last stage knows and sends to the others, happens in the engine as in any other run.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.pipeline.cut import Holdings, apply_cut, find_holdings
from rapidformer.accel.pipeline.discovery import Usage, find_usage
from rapidformer.accel.pipeline.gates import StageContext, StageEnd, apply_gates
from rapidformer.accel.pipeline.gradients import SharedGradients
from rapidformer.accel.pipeline.layout import FLAG, Layout, Stage, build_layout
from rapidformer.accel.pipeline.refusals import (
    explain_absence,
    explain_gradient_error,
    find_hook_problem,
    find_model_problems,
    list_far_modules,
    refuse_partial_reads,
    refuse_shared_gradients,
)
from rapidformer.accel.pipeline.relay import relay_call
from rapidformer.accel.pipeline.schedule import ScheduledSteps, StageModule
from rapidformer.accel.pipeline.staged_model import apply_staged_calls
from rapidformer.compat.torch_clipping import find_unknown_norm
from rapidformer.config import Settings
from rapidformer.data.update import MicroBatchResult
from rapidformer.dist.topology import Topology
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import put_fact

# A lookup has no product to compute, but its weights are stored and updated like any others.
_LOOKUP_COST = 0.1

Compute = Callable[[int], tuple[Tensor, MicroBatchResult]]
"""The user's forward step for a micro-batch, by number: what to back-propagate, what to log."""


class Pipeline:
    """The stages of one model, as this rank sees them."""

    def __init__(
        self,
        plan: ModelPlan,
        layout: Layout,
        holdings: Holdings,
        context: StageContext,
        *,
        topology: Topology,
        device: torch.device,
        seed: int,
        counts: tuple[int, int],
    ) -> None:
        assert topology.mesh is not None
        self.layout = layout
        self.plan = plan
        self._open = ExitStack()
        self.num_parameters, self.num_trained = counts
        """Counts of the whole model, not of this rank's stages."""
        self.holdings = holdings
        self._context = context
        self._mesh = topology.mesh
        self._group: dist.ProcessGroup = topology.mesh.get_group("pipeline")
        self._process = topology.get_rank("pipeline")
        self._device = device
        self._seed = (seed % 2**63, topology.get_rank("data"))
        self.stages = layout.get_own(self._process)
        self._steps: ScheduledSteps | None = None
        self._names: list[str] | None = None
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._results: dict[int, MicroBatchResult] = {}

    @property
    def local_plan(self) -> ModelPlan:
        """The plan with this rank's blocks: what other switches work on."""
        held = self.holdings.get_held(self._process)
        return replace(
            self.plan,
            blocks=tuple(name for stack in self.stacks for name in stack),
            tied=tuple(names for names in self.plan.tied if names[0] in held),
        )

    @property
    def stacks(self) -> list[tuple[str, ...]]:
        """The names of the blocks of each stage on this rank."""
        return [self.plan.blocks[stage.start : stage.end] for stage in self.stages]

    def attach(self, model: nn.Module) -> None:
        """Put the gates around everything that has been applied."""
        self.model = model
        self._far_modules = list_far_modules(model, self.layout, self.plan)
        apply_gates(model, self.plan.get_blocks(model), self._context)
        relay = functools.partial(
            relay_call,
            layout=self.layout,
            context=self._context,
            group=self._group,
            device=self._device,
        )
        apply_staged_calls(model, self._context, relay, len(self.plan.blocks))
        absent = self.holdings.processes_of.keys() - self.holdings.get_held(self._process)
        refuse_partial_reads(model, absent, self.plan.blocks, self._context)
        self.shared = SharedGradients(model, self.holdings, self._mesh)
        shared = self.shared.list_parameters(model)
        for hook in refuse_shared_gradients(shared, self._context):
            self._open.callback(hook.remove)
        self._open.enter_context(self.shared.serve_clipping(model, self._device))
        self._modules = [StageModule(s, self._run_stage, model.parameters) for s in self.stages]

    def close(self) -> None:
        """Take off what is outside the model's modules: hooks of parameters, and clipping."""
        self._open.close()

    # ---- an update -----------------------------------------------------------------------------

    def run(self, compute: Compute, count: int, *, step: int, synchronizer: Any) -> None:
        """Forward and backward of an update's micro-batches; leaves sums in every ``.grad``."""
        problem = find_hook_problem(self._far_modules)
        if problem:
            raise RapidformerError(problem)
        self._compute, self._step = compute, step
        self._results.clear()
        synchronizer.before_backward(False)
        try:
            # At first on all stages, so that all of them find a mistake in the forward step at
            # once.
            self._shapes = {
                (stage.index, number): self._probe(stage, number)
                for stage in self.stages
                for number in range(count)
                if not stage.is_first or self._steps is None
            }
            self._get_steps(count).run()
        except RuntimeError as error:
            # torch wraps an error of the user's forward step in its own text.
            if isinstance(error.__cause__, RapidformerError):
                raise error.__cause__ from None
            raise
        finally:
            # Evaluation continues from here: the same random numbers on all stages.
            self._seed_all(count, 0)
        synchronizer.before_backward(True)
        if isinstance(self.model, FSDPModule):
            _finish_sharded(self.model)
        synchronizer.after_backward()
        self.shared.sum(self.model)

    def _get_steps(self, count: int) -> ScheduledSteps:
        if self._steps is None or self._steps.count != count:
            self._steps = ScheduledSteps(
                self.layout,
                self._modules,
                count,
                device=self._device,
                group=self._group,
                dtype=self._context.dtype,
                get_shape=lambda stage, number: self._shapes[stage.index, number],
            )
        return self._steps

    def _probe(self, stage: Stage, number: int) -> torch.Size:
        """The shape of a stage's input: what the model would have given its first block."""
        self._seed_all(number, 0)
        # Modules before the blocks update their running means where their weights are: once.
        before = [b.clone() for b in self.model.buffers()] if stage.is_first else []
        with torch.no_grad(), self._context.at(stage, is_probing=True):
            try:
                self._compute(number)
            except StageEnd as end:
                for buffer, value in zip(self.model.buffers(), before, strict=False):
                    buffer.copy_(value)
                return end.hidden.shape
        raise _no_call()

    def _run_stage(self, stage: Stage, number: int, received: Tensor | None) -> Tensor:
        """Run one micro-batch through a stage; returns the loss, or the hidden state to send."""
        # All stages draw the same numbers in the user's code before the model, and their own in
        # their blocks.
        self._seed_all(number, 0)
        on_entry = functools.partial(self._seed_all, number, stage.index)
        with self._context.at(stage, received, on_entry=on_entry):
            try:
                loss, result = self._compute(number)
            except StageEnd as end:
                return end.hidden
            except RuntimeError as error:
                raise explain_gradient_error(error) from error
            if not stage.is_last or not self._context.has_called:
                raise _no_call()
        self._results[number] = replace(result, loss=result.loss.detach())
        return loss

    def _seed_all(self, number: int, stage: int) -> None:
        key = (*self._seed, self._step, number, stage)
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    # ---- after it ------------------------------------------------------------------------------

    def broadcast_results(self, count: int) -> list[MicroBatchResult]:
        """The last stage's losses and weights, on every rank, in one small message."""
        source = self.layout.stages[-1].owner
        if self._names is None:
            names = list(self._results[0].parts) if self._process == source else []
            box = [names]
            dist.broadcast_object_list(box, group=self._group, group_src=source)
            self._names = box[0]
        width = 2 + 2 * len(self._names)
        if self._process == source:
            packed = torch.stack([self._pack(self._results[i]) for i in range(count)])
        else:
            packed = torch.empty(count, width, dtype=torch.float64, device=self._device)
        dist.broadcast(packed, group=self._group, group_src=source)
        return [self._unpack(row) for row in packed]

    def _pack(self, result: MicroBatchResult) -> Tensor:
        """A micro-batch's losses and weights as one tensor."""
        assert self._names is not None
        unknown = [name for name in result.parts if name not in self._names]
        if unknown:
            warn_once(
                f"the forward step returns {', '.join(unknown)} in some micro-batches only: with "
                f"{FLAG} only the names of the first one are reported.",
                is_local=True,
            )
        nothing = (torch.zeros(()), 0.0)
        pairs = [(result.loss, result.weight)]
        pairs += [result.parts.get(name, nothing) for name in self._names]
        return torch.stack([self._to_double(number) for pair in pairs for number in pair])

    def _to_double(self, number: float | Tensor) -> Tensor:
        if isinstance(number, Tensor):
            return number.to(self._device, torch.float64).reshape(())
        # Not as_tensor: a copy from the host would wait for the device.
        return torch.full((), number, dtype=torch.float64, device=self._device)

    def _unpack(self, row: Tensor) -> MicroBatchResult:
        assert self._names is not None
        means = [(row[2 * i].float(), row[2 * i + 1].float()) for i in range(len(row) // 2)]
        return MicroBatchResult(
            loss=means[0][0],
            weight=means[0][1],
            parts=dict(zip(self._names, means[1:], strict=True)),
        )

    def measure_norm(self, measure_local: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """The norm of the gradient over all stages."""
        return self.shared.measure(self.model, measure_local, self._device)


def _no_call() -> RapidformerError:
    return RapidformerError(
        "the forward step returned without calling the model, or called only a part of it: with "
        f"{FLAG} it must call the model itself, once per micro-batch."
    )


def _finish_sharded(model: nn.Module) -> None:
    """Reduce and scatter the remaining gradients, once: torch's end of a stage, for all stages."""
    PipelineStage.perform_reduce_grad(SimpleNamespace(submod=model), 1)  # type: ignore[arg-type]


# ---- deciding and cutting ------------------------------------------------------------------------


def apply(assembly: Assembly) -> str:
    """Keep only this rank's stages; the plan then covers just those."""
    pipeline = build_pipeline(
        assembly.model,
        assembly.whole_plan,
        assembly.args,
        device=assembly.device,
        topology=assembly.topology,
        is_mixed=assembly.precision.dtype is not None,
    )
    assembly.pipeline, assembly.plan = pipeline, pipeline.local_plan
    assembly.applied.on_close(pipeline.close)
    return f"{assembly.topology.pipeline} ranks ({pipeline.layout.describe()})"


def attach(assembly: Assembly) -> None:
    """Row ``stage gates``: around everything that has been applied."""
    assert assembly.pipeline is not None
    assembly.pipeline.attach(assembly.model)


def build_pipeline(
    model: nn.Module,
    plan: ModelPlan,
    args: Settings,
    *,
    device: torch.device,
    topology: Topology,
    is_mixed: bool,
) -> Pipeline:
    """Decide on the stages and drop all parameters of other ranks."""
    problems = find_model_problems(model, plan)
    if problems:
        raise ConfigurationError(problems)
    usage = find_usage(model, plan)
    layout = _build_layout(model, plan, usage, args, topology)
    problem = _find_schedule_problem(model, layout, usage)
    problem = problem or find_hook_problem(list_far_modules(model, layout, plan))
    problem = problem or find_unknown_norm() or ""
    if problem:
        raise ConfigurationError(problem)
    holdings = find_holdings(model, plan, layout, usage)
    context = StageContext(
        dtype=_choose_dtype(model, is_mixed=is_mixed),
        returns_tuple=usage.returns_tuple,
        splits_backward=layout.schedule == "zero-bubble",
    )
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    pipeline = Pipeline(
        plan,
        layout,
        holdings,
        context,
        topology=topology,
        device=device,
        seed=args.seed,
        counts=(total, trained),
    )
    prefixes = tuple(f"{block}." for block in plan.blocks)
    apply_cut(
        model,
        holdings.get_held(topology.get_rank("pipeline")),
        device,
        lambda name: explain_absence(context, name.startswith(prefixes), name),
    )
    # Kept: the blocks can no longer be found by their parameters.
    put_fact(model, pipeline.local_plan)
    return pipeline


def _build_layout(
    model: nn.Module, plan: ModelPlan, usage: Usage, args: Settings, topology: Topology
) -> Layout:
    """Balance the stages by the number of parameters that each computes with."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    last = len(plan.blocks) - 1
    lookups = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    return build_layout(
        [sum(p.numel() for p in block.parameters()) for block in plan.get_blocks(model)],
        before=sum(
            sizes.get(name, 0) * (_LOOKUP_COST if name in lookups else 1.0)
            for name, blocks in usage.blocks_of.items()
            if 0 in blocks
        ),
        after=sum(
            model.get_parameter(name).numel()
            for name, blocks in usage.blocks_of.items()
            if last in blocks
        ),
        num_processes=topology.pipeline,
        schedule=args.pipeline_schedule,
        layers_per_stage=args.num_layers_per_virtual_pipeline_stage,
        model=type(model).__name__,
    )


def _find_schedule_problem(model: nn.Module, layout: Layout, usage: Usage) -> str:
    """Zero-bubble separates a stage's gradients into those of inputs and those of weights.

    torch loses, or miscounts, what a weight gets from several blocks of a stage.
    """
    ends = {0, layout.stages[-1].end - 1}
    shared = [name for name, blocks in usage.blocks_of.items() if blocks - ends]
    if layout.schedule != "zero-bubble" or not shared:
        return ""
    return (
        f"--pipeline-schedule zero-bubble: {shared[0]} of {type(model).__name__} is passed to "
        "several blocks, and this schedule cannot separate their contributions to its gradient: "
        "use --pipeline-schedule 1f1b or interleaved."
    )


def _choose_dtype(model: nn.Module, *, is_mixed: bool) -> torch.dtype:
    """The dtype of hidden states between stages: that of the widest weight."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if is_mixed or torch.float32 in dtypes or not dtypes:
        return torch.float32
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
