"""Sequence parallelism: between its split layers, each process holds its share of the tokens.

What tensor parallelism leaves whole on every process (norms, dropout, residual sums) is divided by
tokens: each rank takes its share before the first block; attention and feed-forward layers gather
all tokens and scatter their sums; after the last block tokens are joined. Only in training: an
evaluation keeps its tokens together. Rows of any length will do; shares may differ by a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rapidformer.accel.tensor_styles import (
    FirstBlock,
    LastBlock,
    SequenceRegion,
    Split,
    TokenGatherer,
    extend_class,
)
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import TensorPlan, describe_model

_GATHERED = {"colwise", "key_value", "fused_qkv"}


def apply_sequence_parallel(
    model: nn.Module,
    plan: ModelPlan,
    tensor_plan: TensorPlan,
    mesh: DeviceMesh,
    stacks: Sequence[tuple[str, ...]] = (),
) -> nn.Module:
    """Split the tokens between the layers of every block, which are split already.

    ``stacks`` are the blocks of each stage of a pipeline, between which tokens are whole.
    """
    problem = _find_problem(model, plan, tensor_plan)
    if problem:
        raise ConfigurationError(
            f"--sequence-parallel cannot split the tokens of {describe_model(model)}: {problem} "
            "Leave the switch out; --tensor-model-parallel-size works without it."
        )
    region = SequenceRegion(mesh.get_group())
    gatherers = {_get_parent(n) for n, s in tensor_plan.styles.items() if s in _GATHERED}
    for block in plan.blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if name in gatherers:
                _extend(module, region, mesh, TokenGatherer)
            if name in tensor_plan.styles:
                _get_split(module, mesh).region = region
            is_inside = any(name.startswith(f"{gatherer}.") for gatherer in gatherers)
            if "rapidformer_split" in module.__dict__ and (
                not is_inside or tensor_plan.styles.get(name) == "rowwise"
            ):
                _get_split(module, mesh).is_among_tokens = True
    for stack in stacks or [plan.blocks]:
        _extend(model.get_submodule(stack[0]), region, mesh, FirstBlock)
        _extend(model.get_submodule(stack[-1]), region, mesh, LastBlock)
    return model


def _find_problem(model: nn.Module, plan: ModelPlan, tensor_plan: TensorPlan) -> str | None:
    if tensor_plan.sequence_problem:
        return tensor_plan.sequence_problem
    if len({_get_parent(name) for name in plan.blocks}) != 1:
        return "its blocks are not one list."
    if any(hasattr(module, "experts") for module in model.modules()):
        return "it has a mixture of experts, whose loss is one over all tokens."
    if getattr(getattr(model, "config", None), "add_cross_attention", False):
        return "its blocks look at an encoder's output too, whose tokens are whole."
    gathered = [name for name, style in tensor_plan.styles.items() if style in _GATHERED]
    if any(_get_parent(name) in plan.blocks for name in gathered):
        return "layers of its plan stand in the block itself, not in a module of it."
    return None


def _get_parent(name: str) -> str:
    return name.rpartition(".")[0]


def _get_split(module: nn.Module, mesh: DeviceMesh) -> Split:
    split = module.__dict__.get("rapidformer_split")
    return split if isinstance(split, Split) else Split(mesh=mesh)


def _extend(module: nn.Module, region: SequenceRegion, mesh: DeviceMesh, style: type) -> None:
    split = _get_split(module, mesh)
    split.region = region
    extend_class(module, split, style)
