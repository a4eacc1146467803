"""The parameters of a model as a plan sees them: sizes, and what splits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from rapidformer.accel.expert.parallel import find_experts
from rapidformer.accel.tensor.parallel import count_key_value_heads
from rapidformer.compat.transformers_models import is_conv1d
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import ModelPlan
from rapidformer.models.tensor_plans import BY_INPUTS, TensorPlan, find_tensor_plan
from rapidformer.planning.parts import Parameter, Weights

_BY_OUTPUT = ("colwise", "colwise_gather_output", "key_value", "fused_qkv", "fused_kv")
_JOINED = ("colwise_gather_output", "embedding_rowwise", *BY_INPUTS)
"""Styles after which every rank has the whole result."""


class SplitRules:
    """Which parameters of a model are split, and along which dimension."""

    def __init__(self, model: nn.Module, plan: ModelPlan) -> None:
        try:
            self._tensor = find_tensor_plan(model, plan)
        except RapidformerError:  # a model that cannot be split: a run would be refused
            self._tensor = TensorPlan(styles={})
        self._model = model
        self._experts = {name for name, _ in find_experts(model, plan)}

    def find_dim(self, module_name: str, module: nn.Module, name: str) -> int | None:
        """The dimension of a parameter that tensor parallelism splits."""
        if f"{module_name}.{name}" in self._tensor.parameters:
            return 0
        style = self._tensor.styles.get(module_name, "")
        is_matrix = name != "bias"
        if style == "embedding_rowwise":
            return 0
        if style in _BY_OUTPUT:
            if isinstance(module, nn.Embedding) or (is_conv1d(type(module)) and is_matrix):
                return 1
            return 0
        if style in BY_INPUTS and is_matrix:
            return 0 if is_conv1d(type(module)) else 1
        return None

    def count_heads(self, module_name: str) -> int:
        """Key/value heads that a layer computes; 0 for any other."""
        is_own = self._tensor.styles.get(module_name) == "key_value"
        return count_key_value_heads(self._model, module_name) if is_own else 0

    def is_expert(self, module_name: str) -> bool:
        """Whether a module's parameters have a slice per expert."""
        return any(
            module_name == name or module_name.startswith(f"{name}.") for name in self._experts
        )

    def list_edges(self) -> Iterator[tuple[nn.Module, bool]]:
        """Layers of the followed model after which activations are split, or whole again."""
        modules = dict(self._model.named_modules())
        for name, style in self._tensor.styles.items():
            if name in modules and style in (*_BY_OUTPUT, *_JOINED):
                yield modules[name], style not in _JOINED


def count_weights(
    module: nn.Module,
    rules: SplitRules,
    prefix: str = "",
    *,
    without: Sequence[str] = (),
    used_after: frozenset[int] = frozenset(),
) -> Weights:
    """Every parameter of a module once, except for those of the parts ``without``."""
    owners = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    found: dict[int, Parameter] = {}
    left_out = tuple(f"{name}." for name in without)
    for name, part in module.named_modules():
        full = ".".join(filter(None, (prefix, name)))
        if f"{full}.".startswith(left_out) and left_out:
            continue
        for own, parameter in part.named_parameters(recurse=False):
            found.setdefault(
                id(parameter),
                Parameter(
                    length=parameter.shape[0] if parameter.dim() else 1,
                    size=parameter.numel(), width=parameter.element_size(),
                    is_trained=parameter.requires_grad,
                    is_matrix=bool(prefix) and parameter.dim() == 2,
                    places=_find_places(parameter, used_after, owners),
                    split_dim=rules.find_dim(full, part, own), heads=rules.count_heads(full),
                    is_expert=rules.is_expert(full),
                ),
            )  # fmt: skip
    return Weights(parameters=tuple(found.values()))


def _find_places(
    parameter: nn.Parameter, used_after: frozenset[int], owners: Counter[int]
) -> tuple[str, ...]:
    if id(parameter) not in used_after:
        return ("before",)
    return ("before", "after") if owners[id(parameter)] > 1 else ("after",)
