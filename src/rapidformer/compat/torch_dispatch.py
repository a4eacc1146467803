"""Operators: observing them as they run, their schemas, and those without a public name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rapidformer.compat.patches import KNOWN, Entry, Patch

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map_only"]

PRIVATE_NAMES = {
    "torch.utils._python_dispatch.TorchDispatchMode": "recording how a model is built",
    "torch.utils._pytree.tree_leaves": "tensors in nested arguments of an operator",
    "torch.utils._pytree.tree_map_only": "replacing tensors in nested arguments",
    "torch.autograd.function._SingleLevelFunction": "arguments of custom autograd functions",
    "torch._ops.OpOverload._schema": "which arguments an operator writes into",
    "torch._C.DisableTorchFunction": "seeing recorded tensors unchanged",
    "torch._C._current_graph_task_id": "distinguishing a recomputed block from a first pass",
    "torch._C._autograd._top_saved_tensors_default_hooks": "a loss inside a checkpoint",
    "torch._native_multi_head_attention": "torch's fast attention under context parallelism",
    "torch._transformer_encoder_layer_fwd": "torch's fast encoder under context parallelism",
    "torch.ops.aten._grouped_mm": "what selective recompute keeps",
    "torch.ops.aten._scaled_dot_product_flash_attention": "what selective recompute keeps",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "what selective recompute keeps",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "what selective recompute keeps",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "what selective recompute keeps",
}

_aten = torch.ops.aten
EXPENSIVE_OPERATORS = (
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Matrix products over experts, and attention in one kernel, as autograd sees them."""
FUSED_ATTENTIONS = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
"""Functions in which torch's own layers compute attention and more in one call."""


def get_schema(operator: Any) -> Any:
    """An operator's name, arguments and results; None for a plain function."""
    return getattr(operator, "_schema", None)


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes into its arguments; without an overload, any of its own may."""
    overloads: list[str] = getattr(operator, "overloads", list)()
    each = [getattr(operator, name) for name in overloads] or [operator]
    schemas = filter(None, map(get_schema, each))
    return any(schema.is_mutable for schema in schemas)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, tensors bypass ``__torch_function__``."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def is_in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def has_saved_tensor_hooks() -> bool:
    """Whether something, such as a checkpoint, handles the tensors that autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


_HAS_PYTHON_APPLY = inspect.ismethod(torch.autograd.Function.apply)
"""Before torch 2.15; looked at once, since replacing it makes it one of Python's."""
_REPLACED: Any = _SingleLevelFunction if _HAS_PYTHON_APPLY else torch.autograd.Function
_CONVERSIONS: dict[type, Callable[[type, Any], Any]] = {}


def convert_function_arguments(kind: type, convert: Callable[[type, Any], Any]) -> Patch:
    """Inside, every ``torch.autograd.Function`` gets its arguments of this type converted.

    Such functions bypass ``__torch_function__``, and torch offers nothing else. ``convert`` gets
    the function's class and one argument. A script may have stored ``MyFunction.apply`` already, so
    ``Function.apply`` is not replaced: its base class, which only inherits ``apply``, gets one that
    converts first. From torch 2.15 on, ``Function.apply`` is native and asks no base class: it is
    replaced, and what was stored before is not seen.
    """
    _CONVERSIONS[kind] = convert
    return _CONVERTING


def sees_stored_functions() -> bool:
    """Whether ``convert_function_arguments`` reaches a ``MyFunction.apply`` stored before it."""
    return _HAS_PYTHON_APPLY


def _apply_converted(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # Again and again: logits that are computed late may still lack padding.
    while any(type(argument) in _CONVERSIONS for argument in args):
        args = tuple(
            _CONVERSIONS[type(argument)](cls, argument)
            if type(argument) in _CONVERSIONS
            else argument
            for argument in args
        )
    return super(_REPLACED, cls).apply(*args, **kwargs)


_CONVERTING = Patch(lambda: [Entry(_REPLACED, "apply", lambda _: classmethod(_apply_converted))])


def find_unknown_functions() -> str | None:
    """Why the arguments of autograd functions cannot be converted; None if they can."""
    inherits = "apply" not in vars(_SingleLevelFunction) or _CONVERTING.is_made
    if not _HAS_PYTHON_APPLY or (
        torch.autograd.Function.__mro__[1] is _SingleLevelFunction and inherits
    ):
        return None
    return (
        f"torch.autograd.Function of torch {torch.__version__} does not inherit apply from a class "
        f"without one, as in torch {KNOWN['torch']}"
    )
