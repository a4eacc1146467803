"""Where a model's blocks are: what recompute, compile and sharding need to know of it.

Sources in order: the model's own ``rapidformer_plan()``, Hugging Face's marks (blocks that support
recompute, modules that must not be split), then the longest list of equal blocks. A plan names
modules; it holds none, so it stays true after parameters are replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rapidformer.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What the switches may rely on."""

    blocks: tuple[str, ...] = ()
    """Names of the repeated blocks, in the order of the forward pass of each stack."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names that are one and the same parameter."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """How layers are split over processes: a pattern of module names to a style
    (``{"layers.*.query": "colwise", "layers.*.output": "rowwise"}``)."""
    divided: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Attributes of modules that count heads, of which each process then has its share."""
    has_split_sequences: bool = False
    """Whether the model's blocks pass on [batch, tokens, hidden] and nothing else, so that
    --sequence-parallel may split the tokens between attention and feed-forward layers."""
    has_split_attention: bool = False
    """Whether the tokens of a block meet in torch's scaled_dot_product_attention alone, on
    [batch, heads, tokens, size], so that --context-parallel-size may share them out."""
    token_dims: Mapping[str, int] = field(default_factory=dict)
    """Arguments of a block with a value for every token, to the dimension of the tokens; those of
    [batch, tokens] and [batch, tokens, size] are found by themselves."""
    has_split_losses: bool = False
    """Whether the model's loss takes logits whose vocabulary is split over processes."""
    before: Sequence[str] = ()
    """Modules that are used before the first block: what a pipeline's first stage has. Found out
    by a trial run where neither this nor ``after`` is said."""
    after: Sequence[str] = ()
    """Modules that are used after the last block: what a pipeline's last stage has."""
    pipeline_problem: str = ""
    """Why the model cannot be cut into stages, if it cannot."""
    experts: tuple[str, ...] = ()
    """Patterns of modules with one slice of every parameter for each expert, which are called with
    rows sorted by expert and the ends of each expert's stretch: what --expert-model-parallel-size
    shares out."""
    source: str = field(default="", compare=False)
    """Who said so: shown at start-up."""

    def get_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.blocks]


def find_plan(model: nn.Module) -> ModelPlan:
    """The plan of a model, from the best source that knows it."""
    known = model.__dict__.get("rapidformer_known_plan")
    if isinstance(known, ModelPlan):
        return known
    tied = _find_tied(model)
    own = getattr(model, "rapidformer_plan", None)
    if callable(own):
        return _read_own_plan(model, own(), tied)
    for source, names in (
        ("blocks marked by transformers", _find_marked_blocks(model)),
        ("the longest list of equal blocks", _find_longest_list(model)),
    ):
        if names:
            return ModelPlan(blocks=tuple(names), tied=tied, source=source)
    return ModelPlan(tied=tied, source="no repeated blocks found")


def _read_own_plan(
    model: nn.Module, plan: ModelPlan | Mapping[str, Any], tied: tuple[tuple[str, ...], ...]
) -> ModelPlan:
    if not isinstance(plan, ModelPlan):
        plan = _read_mapping(model, plan)
    names = plan.blocks
    known = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in names if name not in known]
    missing += [n for n in (*plan.before, *plan.after) if n not in known and n not in parameters]
    if missing:
        raise ModelError(
            f"{type(model).__name__}.rapidformer_plan() names modules that the model does not "
            f"have: {', '.join(missing)}."
        )
    blocks: list[str] = []
    for name in names:
        is_list = isinstance(known[name], nn.ModuleList)
        blocks += [f"{name}.{i}" for i in range(len(known[name]))] if is_list else [name]  # type: ignore[arg-type]
    return replace(plan, blocks=tuple(blocks), tied=tied, source="the model's rapidformer_plan()")


def _read_mapping(model: nn.Module, plan: Mapping[str, Any]) -> ModelPlan:
    """The same plan written as a plain dictionary, which needs no import of ours."""
    known = {"blocks", "tensor", "divided", "has_split_sequences", "has_split_losses"}
    known |= {"before", "after"}
    known |= {"has_split_attention", "token_dims", "experts"}
    unknown = sorted(set(plan) - known)
    if unknown:
        raise ModelError(
            f"{type(model).__name__}.rapidformer_plan() has unknown keys: {', '.join(unknown)}. "
            f"Known are {', '.join(sorted(known))}."
        )
    blocks, experts = plan.get("blocks", ()), plan.get("experts", ())
    return ModelPlan(
        blocks=(blocks,) if isinstance(blocks, str) else tuple(blocks),
        tensor=plan.get("tensor", {}),
        divided=plan.get("divided", {}),
        has_split_sequences=bool(plan.get("has_split_sequences", False)),
        has_split_losses=bool(plan.get("has_split_losses", False)),
        before=_read_names(plan.get("before", ())),
        after=_read_names(plan.get("after", ())),
        has_split_attention=bool(plan.get("has_split_attention", False)),
        token_dims=plan.get("token_dims", {}),
        experts=(experts,) if isinstance(experts, str) else tuple(experts),
    )


def _read_names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _find_marked_blocks(model: nn.Module) -> list[str]:
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return []
    found: list[str] = []
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module)
            and all(isinstance(child, GradientCheckpointingLayer) for child in module)
        ):
            found += [f"{name}.{i}" for i in range(len(module))]
    return found


def _find_longest_list(model: nn.Module) -> list[str]:
    best: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        children = list(module)
        shapes = {tuple(p.shape for p in child.parameters()) for child in children}
        is_equal = len({type(child) for child in children}) == 1 and len(shapes) == 1
        if is_equal and shapes != {()} and len(children) > len(best):
            best = [f"{name}.{i}" if name else str(i) for i in range(len(children))]
    return best


def _find_tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model compares each position with the *next* label (causal language models).

    Such a model has no prediction for a row's first label, so that label has no weight in the loss.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    return any(mark in type(model).__name__ for mark in ("CausalLM", "LMHeadModel"))
