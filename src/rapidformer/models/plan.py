"""Where a model's blocks are: what recompute, compile and sharding need to know.

Sources in order: the caller (``engine.compose(plan=...)``), the model's own ``rapidformer_plan()``,
Hugging Face's markers (blocks that support recompute, modules that must not be split), then the
largest lists of similar blocks. What one source leaves out comes from the next. A plan names
modules and holds none, so it stays valid after parameters are replaced.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rapidformer.compat.transformers_models import is_own_model
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.models.towers import is_inside, list_frozen_parts
from rapidformer.overlay import find_fact, get_own_class


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What the switches may rely on."""

    blocks: tuple[str, ...] = ()
    """Names of the repeated blocks, in forward order within each stack."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names that refer to the same parameter."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """How layers are split over ranks, by patterns of names: ``{"layers.*.query": "colwise"}``"""
    divided: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Attributes of modules that count heads; each rank then has its part of them."""
    has_split_sequences: bool = False
    """Whether the model's blocks pass on [batch, tokens, hidden] and nothing else, so that
    --sequence-parallel may split the tokens between attention and feed-forward layers."""
    has_split_attention: bool = False
    """Whether a block's tokens interact only in torch's scaled_dot_product_attention, on [batch,
    heads, tokens, size], so that --context-parallel-size may split them."""
    token_dims: Mapping[str, int] = field(default_factory=dict)
    """Block arguments with a value per token, and their token dimension; those of shape [batch,
    tokens] and [batch, tokens, size] are found automatically."""
    has_split_losses: bool = False
    """Whether the model's loss accepts logits whose vocabulary is split over ranks."""
    before: Sequence[str] = ()
    """Modules used before the first block: what a pipeline's first stage holds. A trial run finds
    them if neither this nor ``after`` is given."""
    after: Sequence[str] = ()
    """Modules used after the last block: what a pipeline's last stage holds."""
    pipeline_problem: str = ""
    """Why the model cannot be split into stages, if it cannot."""
    experts: tuple[str, ...] = ()
    """Patterns of modules whose parameters have one slice per expert, and which are called with
    rows sorted by expert and the end offset of each expert's rows: what
    --expert-model-parallel-size splits."""
    source: str = field(default="", compare=False)
    """Where the plan comes from: shown at start-up."""

    def get_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.blocks]

    def require_blocks(self, model: nn.Module, flag: str) -> list[nn.Module]:
        """The blocks, or an error if there are none."""
        if not self.blocks:
            raise ConfigurationError(
                f"{flag}: no repeated blocks were found in {type(model).__name__}. Give the model "
                "a method rapidformer_plan() that returns {'blocks': 'name.of.list'}."
            )
        return self.get_blocks(model)


LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""What transformers calls the chance of skipping a block in training."""


def skips_blocks(model: nn.Module) -> bool:
    """Whether a model skips some of its blocks in training, at random (LayerDrop)."""
    configs = (getattr(module, "config", None) for module in model.modules())
    unique = {id(config): config for config in configs}.values()
    return any(getattr(config, name, 0) for config in unique for name in LAYER_DROPS)


GivenPlan = ModelPlan | Mapping[str, Any]
_KEYS = (
    "blocks", "tensor", "divided", "has_split_sequences", "has_split_losses", "before", "after",
    "has_split_attention", "token_dims", "experts",
)  # fmt: skip
_LEAST_SIZE = 0.1
"""Another list has blocks too if it has this fraction of the largest list's weights."""
MARKED = "blocks marked by transformers"


def find_plan(model: nn.Module, given: GivenPlan | None = None) -> ModelPlan:
    """The plan of a model, from the best source available; ``given`` takes precedence."""
    known = find_fact(model, ModelPlan)
    if known is not None:
        return known
    write = getattr(model, "rapidformer_plan", None)
    if callable(write):
        author = f"{type(model).__name__}.rapidformer_plan()"
        plan = _read_plan(model, write(), author, _find_blocks(model))
        plan = replace(plan, source="the model's rapidformer_plan()")
    else:
        plan = _find_blocks(model)
    if given is not None:
        author = "the plan given to compose()"
        plan = replace(_read_plan(model, given, author, plan), source=author)
    return plan


def expand_patterns(model: nn.Module, patterns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Patterns to modules; ``*`` stands for one part of a dotted name."""
    compiled = [(compile_pattern(pattern), value) for pattern, value in patterns.items()]
    for name, _ in model.named_modules(remove_duplicate=False):
        for pattern, value in compiled:
            if pattern.fullmatch(name):
                yield name, value


def compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))


def _find_blocks(model: nn.Module) -> ModelPlan:
    tied = find_tied(model)
    # ALBERT's block, which runs once per layer. With several groups, none is the last to run.
    is_shared = getattr(getattr(model, "config", None), "num_hidden_groups", 0) == 1
    modules = [name for name, _ in model.named_modules()] if is_shared else []
    shared = [name for name in modules if name.endswith("albert_layer_groups.0")]
    # A tower that does not learn is no business of recompute, stages or unpadding.
    idle = list_frozen_parts(model)
    for source, found in (
        (MARKED, _find_marked_blocks(model)),
        ("the block that all layers share", shared),
        ("found by their structure", _find_block_lists(model)),
    ):
        if names := [name for name in found if not is_inside(name, idle)]:
            return ModelPlan(blocks=tuple(names), tied=tied, source=source)
    return ModelPlan(tied=tied, source="no repeated blocks found")


def _read_plan(model: nn.Module, plan: GivenPlan, author: str, other: ModelPlan) -> ModelPlan:
    """A written plan; what it leaves out is taken from the other one."""
    if isinstance(plan, ModelPlan):
        fields = (*_KEYS, "pipeline_problem")
        values = {name: getattr(plan, name) for name in fields if getattr(plan, name)}
    else:
        values = _check_mapping(model, plan, author)
    for key in values.keys() & {"blocks", "before", "after", "experts"}:
        values[key] = (values[key],) if isinstance(values[key], str) else tuple(values[key])
    if "blocks" in values:
        values["blocks"] = _expand_blocks(model, values["blocks"], author)
    return replace(other, **values)


def _expand_blocks(model: nn.Module, names: tuple[str, ...], author: str) -> tuple[str, ...]:
    """A list stands for its members."""
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known]
    if missing:
        raise ModelError(
            f"{author} names modules that the model does not have: {', '.join(missing)}."
        )
    blocks: list[str] = []
    for name in names:
        is_list = isinstance(known[name], nn.ModuleList)
        blocks += [f"{name}.{i}" for i in range(len(known[name]))] if is_list else [name]
    return tuple(blocks)


def _check_mapping(model: nn.Module, plan: Mapping[str, Any], author: str) -> dict[str, Any]:
    """The same plan written as a plain dictionary, which needs no import of ours."""
    unknown = sorted(set(plan) - set(_KEYS))
    if unknown:
        raise ModelError(
            f"{author} has unknown keys: {', '.join(unknown)}. "
            f"Known are {', '.join(sorted(_KEYS))}."
        )
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    for key in ("tensor", "divided", "before", "after"):
        # A misspelled pattern would silently leave its layers whole.
        patterns = plan.get(key, ())
        idle = [
            pattern
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
            if not any(map(compile_pattern(pattern).fullmatch, names))
        ]
        if idle:
            raise ModelError(
                f"{author}: nothing in {type(model).__name__} has the name {', '.join(idle)} "
                f"({key!r}). `*` stands for one part of a name; model.named_modules() lists them."
            )
    return dict(plan)


def _find_marked_blocks(model: nn.Module) -> list[str]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and all(isinstance(child, GradientCheckpointingLayer) for child in module)
    }
    # Swin marks its stages, each of another size, and the blocks inside them, which are many alike.
    innermost = [n for n in lists if not any(other.startswith(f"{n}.") for other in lists)]
    return [f"{name}.{i}" for name in innermost for i in range(len(lists[name]))]


def _find_block_lists(model: nn.Module) -> list[str]:
    """The list of similar modules with the most weights, and others like it (a decoder's blocks).

    Not the longest: heads, experts and classifiers may be more numerous than blocks. Heads over a
    large vocabulary may be larger, too, so single layers count only if there is nothing else.
    Experts are inside blocks, which have more weights and so come first.
    """
    lists = list(_iterate_block_lists(model))
    lists.sort(key=lambda blocks: (not blocks.has_single_layers, blocks.size), reverse=True)
    chosen: list[_BlockList] = []
    for blocks in lists:
        prefixes = [f"{other.name}.".removeprefix(".") for other in chosen]
        is_inside = blocks.name.startswith(tuple(prefixes))
        is_like_largest = blocks.is_stack and blocks.size >= _LEAST_SIZE * lists[0].size
        if not chosen or (is_like_largest and not is_inside):
            chosen.append(blocks)
    chosen.sort(key=lambda blocks: blocks.place)
    return [name for blocks in chosen for name in blocks.members]


@dataclass(frozen=True, kw_only=True)
class _BlockList:
    """Similar modules in a list."""

    name: str
    place: int
    """Among all modules of the model: an encoder usually comes before its decoder."""
    members: list[str]
    size: int
    """Weights of all members."""
    has_single_layers: bool
    """Whether the members are torch's own layers, such as embeddings or linear heads."""
    is_stack: bool
    """Whether it looks like blocks: the members consist of other modules. Of lists in a list, like
    Funnel's, which differ in how they call their members, only the largest is taken."""


def _iterate_block_lists(model: nn.Module) -> Iterator[_BlockList]:
    for place, (name, module) in enumerate(model.named_modules()):
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members = {i: child for i, child in enumerate(module) if child is not None}
        children = list(members.values())
        is_of_lists = any(isinstance(c, (nn.ModuleList, nn.ModuleDict)) for c in children)
        if len(children) < 2 or is_of_lists:  # nobody calls a list in a list
            continue
        is_in_list = name.rpartition(".")[2].isdigit()
        has_parts = bool(list(children[0].children()))
        if any(True for _ in module.parameters()) and _is_similar(children):
            yield _BlockList(
                name=name, place=place, size=sum(p.numel() for p in module.parameters()),
                members=[f"{name}.{i}".removeprefix(".") for i in members],
                has_single_layers=_is_from(children[0], "torch") and not has_parts,
                is_stack=has_parts and not is_in_list,
            )  # fmt: skip


def _is_similar(members: Sequence[nn.Module]) -> bool:
    """Whether modules may be a stack of blocks, all equal or of a few kinds that take turns.

    Dense layers and layers with experts usually have the same attention. Failing that, kinds must
    recur. A model's embedding, encoder and head in one ``Sequential`` do neither.
    """
    kinds = Counter(map(_describe_kind, members))
    if len(kinds) == 1:
        return True
    # Of its own layers, transformers marks those that can be used as blocks.
    if not all(list(block.children()) and not _is_from(block, "transformers") for block in members):
        return False
    has_one_class = len({type(member) for member in members}) == 1
    if min(kinds.values()) > 1 or (has_one_class and len(kinds) < len(members)):
        return True
    parts = [set(_iterate_parts(member)) for member in members]
    return bool(set.intersection(*parts))


def _is_from(module: nn.Module, library: str) -> bool:
    return type(module).__module__.partition(".")[0] == library


def _describe_kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple(parameter.shape for parameter in module.parameters())


def _iterate_parts(block: nn.Module) -> Iterator[tuple[Any, ...]]:
    """What tells parts of a block apart: those with a matrix, unlike norms, and not embeddings."""
    for name, part in block.named_children():
        has_matrix = any(parameter.dim() > 1 for parameter in part.parameters())
        if has_matrix and not isinstance(part, nn.Embedding):
            yield name, _describe_kind(part)


def find_tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that share a parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def runs_in_library_code(model: nn.Module, block: str) -> bool:
    """Whether transformers' own code hands hidden states from this block to the next one."""
    owner = find_owner(model, block)
    is_own = str(get_own_class(owner).forward.__module__).startswith("transformers.")
    return is_own and "forward" not in vars(owner)


def find_owner(model: nn.Module, block: str) -> nn.Module:
    """The module that holds the list in which a block is."""
    return model.get_submodule(block.rpartition(".")[0].rpartition(".")[0])


def find_outermost(module: nn.Module) -> list[nn.Module]:
    """The outermost models of transformers' own in a module: code around them may be anybody's."""
    if is_own_model(get_own_class(module)):
        return [module]
    return [found for child in module.children() for found in find_outermost(child)]
