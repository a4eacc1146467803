"""ZeRO-1, -2 and -3 (= FSDP): one mechanism, ``fully_shard``, with three settings.

What each stage keeps whole (optimizer state is sharded in all of them):
  1  parameters and gradients between micro-batches; gradients are reduced once, at the last one
  2  parameters; gradients are reduced and scattered in every micro-batch
  3  nothing: parameters are gathered block by block
On a mesh of two axes (replicas x shards), gradients are also summed along the first. A module that
owns a tied weight stays in the root's group, since two groups cannot own one parameter.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from rapidformer.accel.assembly import Assembly, GradientSynchronizer
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.sharding.gathered_weights import GatheredWeights, serve_outside_calls
from rapidformer.accel.sharding.placed_weights import PlacedWeights
from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.compat.torch_distributed import QUIET_VIEWS
from rapidformer.compat.torch_fsdp import forget_sharding, make_root
from rapidformer.config import Settings
from rapidformer.config.sections import ParallelArguments
from rapidformer.dist.topology import build_lone_mesh
from rapidformer.dist.whole import gather_with_gradient
from rapidformer.errors import ModelError
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import extend

Call = tuple[bool, bool, int, frozenset[tuple[str, bool | str | None]]]


def apply(assembly: Assembly) -> str:
    """Shard the training state over the ranks with different tokens."""
    model, args, mesh = assembly.model, assembly.args, _get_mesh(assembly)
    same_experts = assembly.topology.get_expert_mesh("expert_data")
    if same_experts is not None:  # each rank's experts, over the ranks that hold the same ones
        options = _get_options(same_experts, args.zero_stage, offloads=args.cpu_offload)
        for module in assembly.experts:
            fully_shard(module, **options)
    stage = 1 if _is_reduced_late(args) else args.zero_stage
    assembly.applied.enter(QUIET_VIEWS)
    group = assembly.topology.get_replica_group()
    sharded = apply_sharding(model, assembly.plan, mesh, stage, group, offloads=args.cpu_offload)
    assembly.synchronizer = sharded
    assembly.applied.on_close(_take_off, model, sharded)
    if assembly.pipeline is None:  # a rank with several stages runs them in the schedule's order
        require_steady_depth(model, assembly.plan.blocks)
    return _describe(args, mesh)


def _take_off(model: nn.Module, gradients: ShardedGradients) -> None:
    """Leave shards, with what the user changed in gathered weights; the rest goes with the row."""
    gradients.close()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            forget_sharding(module)


def _get_mesh(assembly: Assembly) -> DeviceMesh:
    """The ranks with different tokens; a single rank if its weights are offloaded."""
    topology = assembly.topology
    mesh = topology.get_sharding_mesh()
    if mesh is not None:
        return mesh
    return build_lone_mesh(assembly.device.type) if topology.mesh is None else topology.mesh["data"]


def _is_reduced_late(args: ParallelArguments) -> bool:
    """Zero-bubble assigns gradients unseen by fully_shard's hooks: they are reduced at the end."""
    return args.pipeline_model_parallel_size > 1 and args.pipeline_schedule == "zero-bubble"


def _describe(args: Settings, mesh: DeviceMesh) -> str:
    count = mesh.size(mesh.ndim - 1)
    text = f"stage {args.zero_stage} over {count} rank{'s' * (count > 1)}"
    if mesh.ndim > 1:
        text += f", {mesh.size(0)} replicas"
    if _is_reduced_late(args):
        text += ", but weights and gradients are whole during an optimizer step"
    return text + (", kept in host memory" if args.cpu_offload else "")


def gather_weight(synchronizer: object, parameter: Tensor) -> Tensor:
    """A whole parameter for use in a loss, with the gradient of one process."""
    if isinstance(synchronizer, ShardedGradients):
        return synchronizer.gathered_weights.gather(parameter)
    return gather_with_gradient(parameter)


class ShardedGradients(GradientSynchronizer):
    """Tells the sharded model, before each backward pass, whether it is the update's last."""

    def __init__(
        self, model: nn.Module, stage: int, scalars: GradientReducer | None = None
    ) -> None:
        assert isinstance(model, FSDPModule)
        self.scalars = scalars
        """Sums the gradients of parameters that are single numbers, which nothing shards."""
        self._root = model
        self.gathered_weights = GatheredWeights(model, stage)
        self.stage = stage
        self._was_last: bool | None = None
        self._placed: PlacedWeights | None = None

    def place_weights(self) -> PlacedWeights:
        """What gathers weights to fixed places; all ranks call this."""
        if self._placed is None:
            self._placed = PlacedWeights(self._root, self.gathered_weights)
        return self._placed

    def close(self) -> None:
        """Leave nothing gathered."""
        if self.scalars is not None:
            self.scalars.close()
        if self._placed is not None:
            self._placed.close_places()
        self.gathered_weights.release()

    def before_backward(self, is_last: bool) -> None:
        if self.scalars is not None:
            self.scalars.before_backward(is_last)
        if is_last == self._was_last:
            return  # each of these calls walks through all modules
        self._was_last = is_last
        self._root.set_is_last_backward(is_last)
        if self.stage == 1:
            self._root.set_requires_gradient_sync(is_last)
        if self.stage < 3:
            self._root.set_reshard_after_backward(is_last)

    def after_backward(self) -> None:
        if self.scalars is not None:
            self.scalars.after_backward()
        if self._was_last and self._placed is not None and self._placed.must_reduce:
            self._placed.reduce()


def apply_sharding(
    model: nn.Module,
    plan: ModelPlan,
    mesh: DeviceMesh,
    stage: int,
    group: dist.ProcessGroup | None,
    *,
    offloads: bool = False,
) -> ShardedGradients:
    """Shard the training state over the mesh; with ``offloads`` it stays in host memory.

    A parameter that is a single number (CLIP's ``logit_scale``) stays whole on every rank of the
    ``group``: there is nothing to shard.
    """
    options = _get_options(mesh, stage, offloads=offloads)
    scalars = [p for p in model.parameters() if p.dim() == 0]
    options["ignored_params"] = set(scalars)
    tied_names = {name for group in plan.tied for name in group}
    for name in plan.blocks:
        if not any(tied.startswith(f"{name}.") for tied in tied_names):
            fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums over the ranks; the engine divides once, by the exact count. Both
            # calls are needed: gloo refuses the factor alone.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Instead of torch's own refusal, which says neither why nor what to do.
            module.__dict__["__deepcopy__"] = _refuse_copy
    reducer = GradientReducer(scalars, group) if scalars and group is not None else None
    gradients = ShardedGradients(model, stage, reducer)
    serve_outside_calls(model, gradients.gathered_weights)
    if hasattr(model, "generate"):
        weights = gradients.gathered_weights
        extend(model, "sharding", lambda cls: _build_generate(cls, weights, is_synced=stage == 3))
    return gradients


def _get_options(mesh: DeviceMesh, stage: int, *, offloads: bool) -> dict[str, Any]:
    """The arguments of ``fully_shard``, for every module of a model."""
    policy = OffloadPolicy()
    if offloads:
        # Pinned memory needs an accelerator; asking for it without one is an error.
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    return {"mesh": mesh, "reshard_after_forward": stage == 3, "offload_policy": policy}


def _build_generate(
    cls: Any, gathered_weights: GatheredWeights, *, is_synced: bool
) -> dict[str, Any]:
    """``generate`` calls an encoder directly, whose weights (the embeddings) are the root's."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The root must know that it is one before a part of it is called.
        make_root(self)
        with gathered_weights.keep():
            self.unshard()
            return cls.generate(self, *args, **{"synced_gpus": is_synced, **kwargs})

    return {"generate": generate}


def _refuse_copy(memo: Any) -> NoReturn:
    raise ModelError(
        "copy.deepcopy() does not work on a model that ZeRO/FSDP has sharded: the copy could not "
        "gather its weights. For a moving average, copy the shards after compose(), and update the "
        "copies after optimizer.step():\n"
        "    average = [p.detach().clone() for p in model.parameters()]\n"
        "    for mean, p in zip(average, model.parameters()): mean.lerp_(p.detach(), 0.01)\n"
        "To evaluate it, swap the values in (p.data.copy_(mean)) and swap them back afterwards. "
        "torch's AveragedModel(model) is made before compose(), and averages whole weights:\n"
        "    whole = [engine.model.gather_weight(p).detach() for p in model.parameters()]\n"
        "    average.update_parameters(torch.nn.ParameterList(whole))\n"
        "engine.export(folder) writes the whole model."
    )


# ---- a steady depth ------------------------------------------------------------------------------


def require_steady_depth(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Refuse a depth that depends on the data (LayerDrop, early exit): ranks gather together."""
    depth = _Depth()
    skip = torch.compiler.disable
    model.register_forward_pre_hook(skip(depth.start), prepend=True, with_kwargs=True)
    model.register_forward_hook(skip(depth.finish))
    for name in blocks:
        block = model.get_submodule(name)
        if isinstance(block, FSDPModule):
            # Not a partial function: nothing would tell that it is our hook, not the user's.
            def note(module: nn.Module, inputs: Any, name: str = name) -> None:
                depth.note(name)

            block.register_forward_pre_hook(skip(note), prepend=True)


class _Depth:
    """Which blocks ran in calls of the model, by their arguments."""

    def __init__(self) -> None:
        self._known: dict[Call, list[str]] = {}
        self._call: Call | None = None
        self._run: list[str] = []

    def start(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # Modes may choose blocks, and are the same on every rank; tensors are data.
        modes = frozenset(
            (name, value if isinstance(value, bool | str) else None)
            for name, value in kwargs.items()
            if value is not None
        )
        self._call = (model.training, torch.is_grad_enabled(), len(args), modes)
        self._run = []

    def note(self, name: str) -> None:
        if self._call is None or is_in_backward():  # a block on its own, or recomputed
            return
        expected = self._known.get(self._call)
        place = len(self._run)
        self._run.append(name)
        if expected is not None and (place >= len(expected) or expected[place] != name):
            raise _refuse(expected, self._run)

    def finish(self, model: nn.Module, args: Any, output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        expected = self._known.setdefault(call, self._run)
        if len(self._run) != len(expected):
            raise _refuse(expected, self._run)


def _refuse(expected: list[str], run: list[str]) -> ModelError:
    """The error that names the first block that differs."""
    place = next(
        (i for i, (a, b) in enumerate(zip(expected, run, strict=False)) if a != b), len(run)
    )
    before = expected[place] if place < len(expected) else "no further block"
    now = run[place] if place < len(run) else "no further block"
    return ModelError(
        f"the model ran {now}, but an earlier call with the same arguments ran "
        f"{before}: its depth depends on the data or on chance (LayerDrop, early exit). Under "
        "ZeRO/FSDP all ranks gather the weights of a block together, so every rank must run the "
        "same blocks. Turn it off (layerdrop=0), run every block and drop its result, or use "
        "data parallelism without ZeRO."
    )
