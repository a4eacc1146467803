"""A model cut into stages, and one update of it.

``apply`` decides and cuts, before any other switch; ``attach`` puts the gates around all other
overlays; ``run`` is an update. Gradients are left as *sums* over the micro-batches; the division by
the total weight, which only the last stage knows and sends to the others, happens in the engine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.accel.assembly import Assembly, Enter
from rapidformer.accel.pipeline.cut import Holdings, apply_cut, find_holdings
from rapidformer.accel.pipeline.discovery import Usage, find_usage
from rapidformer.accel.pipeline.gates import Gate, StageContext, StageEnd, apply_gates
from rapidformer.accel.pipeline.gradients import SharedGradients
from rapidformer.accel.pipeline.layout import FLAG, Layout, Stage, build_layout
from rapidformer.accel.pipeline.refusals import (
    explain_absence,
    explain_gradient_error,
    find_hook_problem,
    find_model_problem,
    list_far_modules,
    refuse_partial_reads,
    refuse_shared_gradients,
)
from rapidformer.accel.pipeline.results import ResultMessages
from rapidformer.accel.pipeline.schedule import ScheduledSteps, StageModule, Wires
from rapidformer.accel.pipeline.staged_model import apply_staged_calls, relay_call
from rapidformer.accel.unpad.calls import Removal
from rapidformer.compat.torch_clipping import find_unknown_norm
from rapidformer.compat.torch_fsdp import reduce_gradients_when_told, reduce_remaining_gradients
from rapidformer.config.sections import ParallelArguments
from rapidformer.data.update import MicroBatchResult
from rapidformer.dist.collectives import max_over_all
from rapidformer.dist.seeding import seed_torch
from rapidformer.dist.topology import Topology
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import describe_other_splits
from rapidformer.optim.gradients import add_gradients, take_gradients
from rapidformer.overlay import drop_fact, find_fact, put_fact, remove

# A lookup has no product to compute, but its weights are stored and updated like any others.
_LOOKUP_COST = 0.1

Compute = Callable[[int], tuple[Tensor, MicroBatchResult]]
"""The user's forward step for a micro-batch, by number: what to back-propagate, what to log."""


class Pipeline:
    """The stages of one model, as this rank sees them."""

    def __init__(
        self, assembly: Assembly, layout: Layout, holdings: Holdings, context: StageContext
    ) -> None:
        """Of a model that is still whole."""
        topology = assembly.topology
        assert topology.mesh is not None
        self.plan, self.layout, self.holdings = assembly.whole_plan, layout, holdings
        parameters = list(assembly.model.parameters())
        self.num_parameters = sum(p.numel() for p in parameters)
        """Of the whole model, not of this rank's stages."""
        self.num_trained = sum(p.numel() for p in parameters if p.requires_grad)
        self._open = ExitStack()
        self._context = context
        self._mesh, self._device = topology.mesh, assembly.device
        self._group: dist.ProcessGroup = topology.mesh.get_group("pipeline")
        self._process = topology.get_rank("pipeline")
        self._seed = (assembly.args.seed % 2**63, topology.get_rank("data"))
        self.stages = layout.get_own(self._process)
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._wires = Wires(
            self._device, self._group, context.dtype, lambda *place: self._shapes[place]
        )
        self._steps: ScheduledSteps | None = None
        self._messages = ResultMessages(
            self._group, layout.stages[-1].owner, self._process, self._device
        )
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
        if isinstance(model, FSDPModule):
            reduce_gradients_when_told(model)
        self._far_modules = list_far_modules(model, self.layout, self.plan)
        apply_gates(self.plan.get_blocks(model), self._context)
        apply_staged_calls(model, self._context, self.relay, len(self.plan.blocks))
        absent = self.holdings.processes_of.keys() - self.holdings.get_held(self._process)
        refuse_partial_reads(model, absent, self.plan.blocks, self._context)
        self.shared = SharedGradients(model, self.holdings, self._mesh)
        shared = self.shared.list_parameters(model)
        for hook in refuse_shared_gradients(shared, self._context):
            self._open.callback(hook.remove)
        self._open.enter_context(self.shared.serve_clipping(model, self._device))
        self._modules = [StageModule(s, self._run_stage, model.parameters) for s in self.stages]

    def list_alone(self, model: nn.Module) -> list[tuple[ModelPlan, Enter]]:
        """The plan of each stage on this rank, and how to run it before it is attached."""
        return [
            (replace(self.plan, blocks=stack), functools.partial(self._stand_alone, model, stage))
            for stack, stage in zip(self.stacks, self.stages, strict=True)
        ]

    @contextmanager
    def _stand_alone(
        self, model: nn.Module, stage: Stage, batch: dict[str, Any]
    ) -> Iterator[list[Tensor]]:
        """Inside, ``model.forward`` runs one stage, on hidden states that nobody has sent."""
        context, blocks = self._context, self.plan.get_blocks(model)
        received: list[Tensor] = []
        apply_gates(blocks, context)
        apply_staged_calls(model, context, self.relay, len(blocks))
        context.is_in_model = True
        try:
            if not stage.is_first:
                with torch.no_grad(), context.at(stage, is_probing=True):
                    shape = model.forward(**batch).shape
                generator = torch.Generator().manual_seed(stage.index)
                hidden = torch.randn(shape, generator=generator, dtype=context.dtype)
                received = [hidden.to(self._device).requires_grad_()]
            with context.at(stage, *received):
                yield received
        finally:
            context.is_in_model = False
            for module in (model, *blocks):
                remove(module, "stages")
                drop_fact(module, Gate)

    def relay(self, run: Callable[[], Any]) -> Any:
        """What ``run``, which calls the model once outside training, returns on the last stage."""
        return relay_call(run, self.layout, self._context, self._group, self._device)

    def close(self) -> None:
        """Take off what is outside the model's modules: hooks of parameters, and clipping."""
        self._open.close()

    def run(self, compute: Compute, count: int, *, step: int, synchronizer: Any) -> None:
        """Forward and backward of an update's micro-batches; leaves sums in every ``.grad``."""
        if problem := find_hook_problem(self._far_modules, self._context.instead):
            raise RapidformerError(problem)
        self._compute, self._step = compute, step
        run = functools.partial(self._run_once, count, synchronizer)
        removal = find_fact(self.model, Removal)
        if removal is None or not removal.is_on:
            run()
        else:
            self._run_without_padding(run, removal)

    def _run_without_padding(self, run: Callable[[], None], removal: Removal) -> None:
        """Run an update, and again with padding if a rank needs some that another has removed.

        It may be a loss on the last stage, code between blocks on any of them, or a hook on one.
        Nothing can stop a schedule halfway, so what has read padding is NaN until its end.
        """
        parameters = list(self.model.parameters())
        earlier = take_gradients(parameters)
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        removal.has_removed = removal.is_missed = False
        run()
        # All ranks: replicas with sharded weights have to repeat it together.
        if all(max_over_all([int(removal.has_removed), int(removal.is_missed)])):
            take_gradients(parameters)
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            removal.is_on = False
            run()
            # A loss that is NaN with padding, too, is bad by itself.
            is_bad = any(bool(result.loss.isnan().any()) for result in self._results.values())
            removal.is_on = bool(max_over_all([int(is_bad)])[0])
            if removal.is_missed and not removal.is_on:
                removal.warn(self._step + 1)
        add_gradients(parameters, earlier)

    def _run_once(self, count: int, synchronizer: Any) -> None:
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
            if self._steps is None or self._steps.count != count:
                self._steps = ScheduledSteps(self.layout, self._modules, count, self._wires)
            self._steps.run()
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
            reduce_remaining_gradients(self.model)
        synchronizer.after_backward()
        self.shared.sum(self.model)

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
            except Exception as error:
                if stage.is_last and self._misses_padding():
                    assert received is not None
                    return self._skip_loss(received, error)
                if isinstance(error, RuntimeError):
                    raise explain_gradient_error(error, self._context) from error
                raise
            if not stage.is_last or not self._context.has_called:
                raise _no_call()
        self._results[number] = replace(result, loss=result.loss.detach())
        return loss

    def _skip_loss(self, received: Tensor, error: Exception) -> Tensor:
        """Instead of a loss that does not take NaN: the update is repeated."""
        if isinstance(self.model, FSDPModule):
            # Its replicas would wait for a backward pass that gathers the same weights.
            raise RapidformerError(
                f"the forward step raised {type(error).__name__} ({error}) on what the model "
                "returns for padding, which is NaN. With sharded weights (ZeRO), such a step "
                "cannot be repeated: leave padding out (losses[mask], losses.masked_fill(~mask, "
                "0)), or set --dynamic-shape off."
            ) from error
        return (received * 0).sum()  # in this order: its gradient has memory, and can be sent

    def _misses_padding(self) -> bool:
        removal = find_fact(self.model, Removal)
        return removal is not None and removal.is_on and removal.is_missed

    def _seed_all(self, number: int, stage: int) -> None:
        key = (*self._seed, self._step, number, stage)
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        seed_torch(seed, self._device)
        np.random.seed(seed)
        random.seed(seed)

    def broadcast_results(self, count: int) -> list[MicroBatchResult]:
        """The last stage's losses and weights, on every rank."""
        return self._messages.broadcast([self._results.get(number) for number in range(count)])

    def measure_norm(self, measure_local: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """The norm of the gradient over all stages."""
        return self.shared.measure(self.model, measure_local, self._device)


def _no_call() -> RapidformerError:
    return RapidformerError(
        "the forward step returned without calling the model, or called only a part of it: with "
        f"{FLAG} it must call the model itself, once per micro-batch."
    )


# ---- deciding and cutting ------------------------------------------------------------------------


def apply(assembly: Assembly) -> str:
    """Decide on the stages and keep only this rank's; the plan then covers just those."""
    model, plan, topology = assembly.model, assembly.whole_plan, assembly.topology
    if problem := find_model_problem(model, plan):
        raise ConfigurationError(problem)
    usage = find_usage(model, plan)
    instead = describe_other_splits(model, plan, "data parallelism")
    layout = _build_layout(model, plan, usage, assembly.args, topology)
    if problem := (
        _find_schedule_problem(model, layout, usage)
        or find_hook_problem(list_far_modules(model, layout, plan), instead)
        or find_unknown_norm()
        or ""
    ):
        raise ConfigurationError(problem)
    holdings = find_holdings(model, plan, layout, usage)
    # Hidden states between stages have the dtype of the widest weight.
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    is_wide = assembly.precision.dtype is not None or len(dtypes) != 1
    context = StageContext(
        dtype=torch.float32 if is_wide else dtypes.pop(),
        tuple_size=usage.tuple_size,
        instead=instead,
        splits_backward=layout.schedule == "zero-bubble",
    )
    pipeline = Pipeline(assembly, layout, holdings, context)
    prefixes = tuple(f"{block}." for block in plan.blocks)
    apply_cut(
        model,
        holdings.get_held(topology.get_rank("pipeline")),
        assembly.device,
        lambda name: explain_absence(context, name.startswith(prefixes), name),
    )
    assembly.pipeline, assembly.plan = pipeline, pipeline.local_plan
    # Kept: the blocks can no longer be found by their parameters.
    put_fact(model, assembly.plan)
    assembly.applied.on_close(pipeline.close)
    return f"{topology.pipeline} ranks ({layout.describe()})"


def attach(assembly: Assembly) -> None:
    """Row ``stage gates``: around everything that has been applied."""
    assert assembly.pipeline is not None
    assembly.pipeline.attach(assembly.model)


def _build_layout(
    model: nn.Module, plan: ModelPlan, usage: Usage, args: ParallelArguments, topology: Topology
) -> Layout:
    """Balance the stages by the number of parameters that each computes with."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    lookups = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    last = len(plan.blocks) - 1
    used_before = [name for name, blocks in usage.blocks_of.items() if 0 in blocks]
    used_after = [name for name, blocks in usage.blocks_of.items() if last in blocks]
    return build_layout(
        [sum(p.numel() for p in block.parameters()) for block in plan.get_blocks(model)],
        before=sum(sizes.get(n, 0) * (_LOOKUP_COST if n in lookups else 1.0) for n in used_before),
        after=sum(model.get_parameter(name).numel() for name in used_after),
        num_processes=topology.pipeline,
        schedule=args.pipeline_schedule,
        layers_per_stage=args.num_layers_per_virtual_pipeline_stage,
        model=type(model).__name__,
    )


def _find_schedule_problem(model: nn.Module, layout: Layout, usage: Usage) -> str:
    """Zero-bubble loses, or miscounts, the gradient that a weight gets from several blocks."""
    ends = {0, layout.stages[-1].end - 1}
    shared = [name for name, blocks in usage.blocks_of.items() if blocks - ends]
    if layout.schedule != "zero-bubble" or not shared:
        return ""
    return (
        f"--pipeline-schedule zero-bubble: {shared[0]} of {type(model).__name__} is passed to "
        "several blocks, and this schedule cannot separate their contributions to its gradient: "
        "use --pipeline-schedule 1f1b or interleaved."
    )
