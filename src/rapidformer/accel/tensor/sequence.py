"""Sequence parallelism: between its split layers, each rank holds its slice of the tokens.

What tensor parallelism leaves whole (norms, dropout, residual sums) is split by tokens: attention
and feed-forward layers gather all tokens and scatter their sums. A part of a block that the plan
does not know gets all tokens. Evaluations keep their tokens together, and so does a forward pass in
which something reads activations between the blocks (a hook, ``output_hidden_states``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.tensor.styles import (
    FirstBlock,
    LastBlock,
    SequenceRegion,
    Split,
    Style,
    TokenGatherer,
    WholeTokens,
    extend_class,
)
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import TensorPlan, describe_model, get_layer_name
from rapidformer.models.watched import find_reader, list_inner_modules
from rapidformer.overlay import find_fact, get_fact

_GATHERED = {"colwise", "key_value", "fused_qkv", "whole_fused_qkv"}
# Styles whose outputs are a slice, and whose sums can be scattered by tokens.
_KNOWN = _GATHERED | {"rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj", "whole"}


def apply(assembly: Assembly) -> str:
    """Split the tokens between the layers of this rank's blocks, which are already split."""
    model, plan, tensor_plan = assembly.model, assembly.plan, assembly.tensor_plan
    mesh = assembly.topology.get_submesh("tensor")
    assert mesh is not None and tensor_plan is not None
    if problem := _find_problem(model, plan, tensor_plan):
        raise ConfigurationError(
            f"--sequence-parallel cannot split the tokens of {describe_model(model)}: {problem} "
            "Remove the switch; --tensor-model-parallel-size works without it."
        )
    region = SequenceRegion(mesh.get_group())
    # Modules whose own layers are split by outputs: they need whole tokens as input.
    gatherers = {_get_parent(n) for n, style in tensor_plan.styles.items() if style in _GATHERED}
    for block in plan.blocks:
        whole = list(_find_whole(block, model.get_submodule(block), tensor_plan, gatherers))
        for name in whole:
            _extend(model.get_submodule(name), region, mesh, WholeTokens)
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if any(name == other or name.startswith(f"{other}.") for other in whole):
                continue
            if name in gatherers:
                _extend(module, region, mesh, TokenGatherer)
            if name in tensor_plan.styles:
                _get_split(module, mesh).region = region
            if find_fact(module, Split) is not None:
                _get_split(module, mesh).surroundings = region
    # Between pipeline stages, tokens are whole.
    for stack in assembly.pipeline.stacks if assembly.pipeline else [plan.blocks]:
        _extend(model.get_submodule(stack[0]), region, mesh, FirstBlock)
        _extend(model.get_submodule(stack[-1]), region, mesh, LastBlock)
    split = _get_split(model, mesh)
    split.region, split.inner = region, list_inner_modules(model, plan.blocks)
    extend_class(model, split, SequenceModel)
    return "between the layers of each block"


class SequenceModel(Style):
    """The whole model: decides which forward passes keep their tokens together."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        split = get_fact(self, Split)
        assert split.region is not None
        reader = find_reader(self, kwargs, split.inner)
        # Not reset at the end: a block recomputed in the backward pass must find it.
        split.region.is_off = reader is not None
        if reader and self.training:
            warn_once(
                f"--sequence-parallel: {reader} needs the activations of all tokens, so such a "
                "forward pass does not split them: the result is right, but no memory is saved. "
                "(If a hook only looks, set hook.only_looks = True.)"
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _find_whole(
    block: str, module: nn.Module, plan: TensorPlan, gatherers: set[str]
) -> Iterator[str]:
    """Parts of a block that take and return all tokens: by their style, or unknown to the plan."""
    for child, part in module.named_children():
        name = f"{block}.{child}"
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            # Not a part itself: the block calls its members.
            yield from _find_whole(name, part, plan, gatherers)
            continue
        styles = {s for n, s in plan.styles.items() if n == name or n.startswith(f"{name}.")}
        if not styles <= _KNOWN or any(_find_unknown(name, part, plan, gatherers)):
            yield name


def _find_unknown(
    name: str, module: nn.Module, plan: TensorPlan, gatherers: set[str]
) -> Iterator[str]:
    """Modules that are not known to treat each token separately."""
    if name in plan.styles or name in gatherers or not any(True for _ in module.parameters()):
        return
    children = list(module.named_children())
    is_planned = any(other.startswith(f"{name}.") for other in plan.styles)
    is_leaf_of_tokens = not children and (
        isinstance(module, nn.Linear) or all(p.dim() == 1 for p in module.parameters())
    )
    if not is_planned and not is_leaf_of_tokens:
        yield name
    for child, part in children:
        yield from _find_unknown(f"{name}.{child}", part, plan, gatherers)


def _find_problem(model: nn.Module, plan: ModelPlan, tensor_plan: TensorPlan) -> str | None:
    if tensor_plan.sequence_problem:
        return tensor_plan.sequence_problem
    if len({_get_parent(name) for name in plan.blocks}) != 1:
        return "its blocks are not one list."
    config = getattr(model, "config", None)
    if getattr(config, "add_cross_attention", False):
        return "its blocks also use an encoder's output, whose tokens are not split."
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "its blocks have inputs of their own, whose tokens are not split."
    free = ("rowwise", "replicated_with_grad_allreduce")
    layers = [name for name, style in tensor_plan.styles.items() if style not in free]
    if any(_get_parent(name) in plan.blocks for name in (*tensor_plan.parameters, *layers)):
        return "layers of its plan are in the block itself, not in a module of it."
    return None


def _get_parent(name: str) -> str:
    """The module that a layer is in; an adapter is a part of its layer."""
    return get_layer_name(name).rpartition(".")[0]


def _get_split(module: nn.Module, mesh: DeviceMesh) -> Split:
    return find_fact(module, Split) or Split(mesh=mesh)


def _extend(module: nn.Module, region: SequenceRegion, mesh: DeviceMesh, style: type) -> None:
    split = _get_split(module, mesh)
    split.region = region
    extend_class(module, split, style)
