"""Tensor parallelism: each rank holds its slice of every layer, by the model's plan.

Every parameter becomes a DTensor on the tensor axis: a slice if the plan splits the layer, else
whole (Replicate). It is replaced once, for all modules that own it, so tied weights stay tied.
Nothing is communicated: all ranks hold equal weights and cut their own slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn.utils.parametrize import is_parametrized

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.double_backward import refuse_double_gradients
from rapidformer.accel.tensor.slices import distribute, make_local
from rapidformer.accel.tensor.styles import (
    Colwise,
    ColwiseGathered,
    Reading,
    Rowwise,
    RowwiseSplit,
    SharedOutputs,
    Split,
    VocabularyEmbedding,
    extend_class,
)
from rapidformer.accel.tensor.vocabulary_loss import WholeOutputs
from rapidformer.compat.torch_distributed import QUIET_JOINING, StridedShard
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.compat.transformers_models import is_conv1d
from rapidformer.config.layout_rules import list_choices
from rapidformer.dist.regions import copy_in, get_slice_bounds
from rapidformer.errors import ConfigurationError
from rapidformer.models.tensor_plans import (
    FLAG,
    TensorPlan,
    describe_model,
    find_tensor_plan,
    find_unsplittable,
    get_layer_name,
)
from rapidformer.models.towers import list_values
from rapidformer.overlay import find_fact, get_fact

_PARTS = {"fused_qkv": 3, "fused_kv": 2, "whole_fused_qkv": 3, "whole_fused_kv": 2}
_CLASSES: dict[str, type] = {
    **dict.fromkeys(("colwise", "key_value", *_PARTS), Colwise),
    "colwise_gather_output": ColwiseGathered,
    "rowwise": Rowwise,
    "rowwise_split_input": RowwiseSplit,
    "embedding_rowwise": VocabularyEmbedding,
    "mla_kv_a_proj": SharedOutputs,
}
_COMPUTED = (
    "has a weight that is computed from other parameters (weight_norm or another parametrization), "
    "which cannot be split. Remove it before compose "
    "(torch.nn.utils.parametrize.remove_parametrizations), or use --zero-3-memory-optimization "
    "instead."
)


@dataclass(kw_only=True)
class _Cut:
    """How one parameter of one module is split."""

    placement: Placement
    reading: Reading | None = None


def apply(assembly: Assembly) -> str:
    """Split the layers by the model's plan, which sequence parallelism needs too."""
    model, mesh = assembly.model, assembly.topology.get_submesh("tensor")
    assert mesh is not None
    assembly.applied.enter(QUIET_JOINING)
    plan = assembly.tensor_plan = find_tensor_plan(model, assembly.plan)
    styles = _resolve_styles(model, plan)
    if problems := list(_find_problems(model, plan, styles, mesh.size())):
        raise ConfigurationError(problems)
    heads = {
        model.get_submodule(name): count_key_value_heads(model, name)
        for name, style in plan.styles.items()
        if style == "key_value"
    }
    cuts = {m: _cut_module(m, style, heads.get(m, 0), mesh) for m, style in styles.items()}
    for name in plan.parameters:
        owner, _, parameter = name.rpartition(".")
        cuts.setdefault(model.get_submodule(owner), {})[parameter] = _Cut(placement=Shard(0))
    readings = _replace_parameters(model, cuts, mesh)
    for module in list(model.modules()):
        if _has_parameters(module):
            _extend(module, styles.get(module), readings.get(module, {}), mesh)
    for name, style in plan.styles.items():
        if style == "mla_kv_a_proj":
            # A key for all heads (its rotated part); a split layer takes the other outputs.
            attention: Any = _get_attention(model, name)
            layer = get_fact(model.get_submodule(name), Split)
            layer.shared_outputs = int(attention.qk_rope_head_dim)
    _divide_attributes(model, plan, mesh.size())
    refuse_double_gradients(assembly, FLAG)
    extend_class(model, find_fact(model, Split) or Split(mesh=mesh), WholeOutputs)
    if assembly.uses_deepspeed:
        make_local(model, mesh)
    return f"{mesh.size()} ranks (plan: {plan.source})"


def _divide_attributes(model: nn.Module, plan: TensorPlan, size: int) -> None:
    """Make attributes that count heads count this rank's."""
    for name, attributes in plan.divided.items():
        owner = model.get_submodule(name)
        for attribute in attributes:
            setattr(owner, attribute, getattr(owner, attribute) // size)
    heads = _get_heads(model)
    for attention in {_get_attention(model, name) for name in plan.styles}:
        groups = getattr(attention, "num_key_value_groups", 0)
        if groups and (heads // groups) % size:
            # transformers repeats each key head this many times; here one serves all local heads.
            attention.num_key_value_groups = heads // size


def count_key_value_heads(model: nn.Module, name: str) -> int:
    """The heads of a layer for keys or values: they may differ from block to block; 0: unknown."""
    heads = _get_heads(model)
    groups = getattr(_get_attention(model, name), "num_key_value_groups", 0)
    if heads and isinstance(groups, int) and groups:
        return heads // groups
    return _get_heads(model, "num_key_value_heads")


def _get_attention(model: nn.Module, name: str) -> Any:
    """The module that a layer is in."""
    return model.get_submodule(get_layer_name(name).rpartition(".")[0])


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in get_parameter_table(module).values())


def _resolve_styles(model: nn.Module, plan: TensorPlan) -> dict[nn.Module, str]:
    """Module -> style; a tied weight that one of its owners splits is split for the others too."""
    styles = {model.get_submodule(name): style for name, style in plan.styles.items()}
    # A layer whose weights are on another pipeline stage has nothing to split.
    styles = {module: style for module, style in styles.items() if _has_parameters(module)}
    for owners in _find_owners(model).values():
        chosen = {styles[module] for module, _ in owners if module in styles}
        if chosen & {"embedding_rowwise", "colwise_gather_output"}:
            for module, name in owners:
                if name == "weight" and isinstance(module, nn.Embedding):
                    styles.setdefault(module, "embedding_rowwise")
                elif name == "weight" and isinstance(module, nn.Linear):
                    styles.setdefault(module, "colwise_gather_output")
    return styles


def _find_owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in get_parameter_table(module).items():
            if parameter is not None:
                owners[id(parameter)].append((module, name))
    return owners


# ---- what cannot work ----------------------------------------------------------------------------


def _find_problems(
    model: nn.Module, plan: TensorPlan, styles: dict[nn.Module, str], size: int
) -> Iterator[str]:
    heads, flag, model_name = _get_heads(model), f"{FLAG} {size}", describe_model(model)
    if heads and heads % size:
        yield (
            f"{flag} does not divide the {heads} attention heads of {model_name}: use "
            f"{list_choices(heads)}."
        )
        return
    layers = [name for name, style in plan.styles.items() if style == "key_value"]
    for few in sorted({count_key_value_heads(model, name) for name in layers}):
        if few and few % size and size % few:
            yield f"{flag} and the {few} key/value heads of {model_name} do not divide each other."
    names = {module: name for name, module in model.named_modules()}
    for module, style in styles.items():
        has_few = style == "key_value" and count_key_value_heads(model, names[module])
        problem = None if has_few else _find_module_problem(module, style, size)
        if problem:
            yield f"{flag}: {names[module]} of {model_name} {problem}"
    for name in plan.styles:
        if is_parametrized(model.get_submodule(name)):
            yield f"{flag}: {name} of {model_name} {_COMPUTED}"
    # Numbers that are divided by the tensor-parallel size on each rank.
    for name, attribute in ((n, attribute) for n in plan.divided for attribute in plan.divided[n]):
        number = getattr(model.get_submodule(name), attribute, None)
        if not isinstance(number, int) or isinstance(number, bool) or number % size:
            yield (
                f"{flag}: {name}.{attribute} of {model_name} is {number}, which is not a multiple "
                f"of {size} ('divided' in the plan)."
            )
    for name in sorted(plan.parameters):
        length = model.get_parameter(name).shape[0]
        if length % size:
            yield f"{flag}: {name} of {model_name} has {length} entries, not a multiple of {size}."
    yield from find_unsplittable(model)


def _find_module_problem(module: nn.Module, style: str, size: int) -> str | None:
    if style in ("replicated_with_grad_allreduce", "whole"):
        return None
    if get_parameter_table(module).get("weight") is None:
        return _COMPUTED
    needed = {"embedding_rowwise": (nn.Embedding,), "colwise": (nn.Linear, nn.Embedding)}
    is_kind = isinstance(module, needed.get(style, (nn.Linear,))) or _is_conv1d(module)
    has_own_forward = not _is_conv1d(module) and not (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    )
    if not is_kind or (isinstance(module, nn.Linear) and has_own_forward):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"is a {kind}, which cannot be split as {style}."
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
        return "has max_norm or scale_grad_by_freq, which need the whole embedding."
    rows = _get_weight(module).shape[0]
    if style == "embedding_rowwise" and -(-rows // size) * (size - 1) >= rows:
        return f"has {rows} rows, so some ranks would get none."
    if style in ("embedding_rowwise", "colwise_gather_output", "mla_kv_a_proj"):
        return None
    length = _get_weight(module).shape[_get_dim(module, style)]
    parts = _PARTS.get(style, 1)
    if length % (parts * size):
        what = "inputs" if "row" in style else "outputs"
        return f"has {length // parts} {what}, not a multiple of {size}."
    return None


def _get_heads(model: nn.Module, name: str = "num_attention_heads") -> int:
    """A number from the model's configuration; 0 if it has none, or if blocks differ."""
    config = getattr(model, "config", None)
    # A multimodal model keeps the heads in a nested configuration.
    text_config = getattr(config, "get_text_config", lambda: config)()
    numbers = {*list_values(text_config, name)}
    number = numbers.pop() if len(numbers) == 1 else None
    return number if isinstance(number, int) else 0


def _is_conv1d(module: nn.Module) -> bool:
    return any(is_conv1d(cls) for cls in type(module).__mro__)


def _get_dim(module: nn.Module, style: str) -> int:
    """The dimension to split: a Linear's outputs come first, those of other layers last."""
    is_row = style.startswith("rowwise")
    if style == "embedding_rowwise":
        return 0
    return int(is_row) if isinstance(module, nn.Linear) else int(not is_row)


def _cut_module(
    module: nn.Module, style: str, key_value_heads: int, mesh: DeviceMesh
) -> dict[str, _Cut]:
    """How each of the module's own parameters is split."""
    if style == "replicated_with_grad_allreduce":
        group = mesh.get_group()
        summed = _Cut(placement=Replicate(), reading=lambda whole: copy_in(whole, group))
        return {name: summed for name, p in get_parameter_table(module).items() if p is not None}
    if style in _PARTS:
        return _cut_fused(module, _PARTS[style], mesh, is_whole=style.startswith("whole"))
    if style in ("mla_kv_a_proj", "whole"):
        return {}
    if key_value_heads % mesh.size():
        return _cut_to_one_head(module, key_value_heads, mesh)
    cuts = {"weight": _Cut(placement=Shard(_get_dim(module, style)))}
    if get_parameter_table(module).get("bias") is not None:
        is_row = style.startswith("rowwise")
        cuts["bias"] = _Cut(placement=Replicate() if is_row else Shard(0))
    return cuts


def _cut_fused(
    module: nn.Module, parts: int, mesh: DeviceMesh, *, is_whole: bool
) -> dict[str, _Cut]:
    """Fused matrices, each split over the ranks; a bias stays whole: FSDP would join it wrongly."""
    group = mesh.get_group()

    def read_rows(whole: Tensor) -> Tensor:
        rows = copy_in(whole, group).view(parts, -1, *whole.shape[1:])
        start, end = get_slice_bounds(rows.shape[1], group)
        return rows[:, start:end].flatten(0, 1)

    sliced = _Cut(placement=Replicate(), reading=read_rows)
    cuts = {"weight": sliced}
    if not is_whole:
        strided = StridedShard(_get_dim(module, "colwise"), split_factor=parts)
        cuts["weight"] = _Cut(placement=strided)
    if get_parameter_table(module).get("bias") is not None:
        cuts["bias"] = sliced
    return cuts


def _cut_to_one_head(module: nn.Module, heads: int, mesh: DeviceMesh) -> dict[str, _Cut]:
    """More ranks than key/value heads: the weight stays whole, and each rank reads its head."""
    group = mesh.get_group()
    head = mesh.get_local_rank() * heads // mesh.size()
    size = _get_weight(module).shape[0] // heads
    rows = slice(head * size, (head + 1) * size)
    cut = _Cut(placement=Replicate(), reading=lambda whole: copy_in(whole, group)[rows])
    return {name: cut for name, p in get_parameter_table(module).items() if p is not None}


def _replace_parameters(
    model: nn.Module, cuts: dict[nn.Module, dict[str, _Cut]], mesh: DeviceMesh
) -> dict[nn.Module, dict[str, Reading]]:
    """Replace parameters by DTensors, one for all owners; returns how they are read."""
    readings: dict[nn.Module, dict[str, Reading]] = defaultdict(dict)
    for owners in _find_owners(model).values():
        planned = [cuts[module][name] for module, name in owners if name in cuts.get(module, {})]
        # One that splits it, if any does.
        planned.sort(key=lambda cut: cut.placement.is_replicate())
        cut = planned[0] if planned else _Cut(placement=Replicate())
        module, name = owners[0]
        parameter = get_parameter_table(module)[name]
        assert parameter is not None
        replaced = distribute(parameter, cut.placement, mesh)
        for module, name in owners:
            get_parameter_table(module)[name] = replaced
            if cut.reading is not None:
                readings[module][name] = cut.reading
    return readings


def _get_weight(module: nn.Module) -> Tensor:
    """The parameter itself, not what a split module reads of it."""
    weight = get_parameter_table(module)["weight"]
    assert weight is not None
    return weight


def _extend(
    module: nn.Module, style: str | None, readings: dict[str, Reading], mesh: DeviceMesh
) -> None:
    """Give a module the class of its style, which reads its parameters in slices."""
    split = Split(mesh=mesh, readings=readings)
    classes = (_CLASSES[style],) if style in _CLASSES else ()
    if isinstance(module, nn.Embedding) and style == "colwise":
        classes = ()  # ids are whole, and its rows are read by slice: nothing to send
    if style in ("embedding_rowwise", "colwise_gather_output"):
        split.length = _get_weight(module).shape[0]
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        # The padding row, which gets no gradient, is in one rank's slice only.
        padding, (start, end) = module.padding_idx, get_slice_bounds(split.length, split.group)
        if padding is not None:
            module.padding_idx = padding - start if start <= padding < end else None
    extend_class(module, split, *classes)
