"""Operators: observing them as they run, their schemas, and those without a public name."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rapidformer.compat.patches import KNOWN, Entry, Patch

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map_only"]

_EXPENSIVE = (
    "_grouped_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
PRIVATE_NAMES = {
    "torch._softmax_backward_data": "attention whose rows are one node of autograd",
    "torch._C._ExcludeDispatchKeyGuard": "what a deferred tensor is, without its values",
    "torch._C.DispatchKeySet": "the same",
    "torch._C.DispatchKey": "the same",
    "torch.utils._python_dispatch.TorchDispatchMode": "recording how a model is built",
    "torch.utils._pytree.tree_leaves": "tensors in nested arguments of an operator",
    "torch.utils._pytree.tree_map_only": "replacing tensors in nested arguments",
    "torch.autograd.function._SingleLevelFunction": "arguments of custom autograd functions",
    "torch._ops.OpOverload._schema": "which arguments an operator writes into",
    "torch.overrides._get_current_function_mode": "compiled code that no mode may look at",
    "torch._C.DisableTorchFunction": "seeing recorded tensors unchanged",
    "torch._C._functorch.peek_interpreter_stack": "models inside torch.func.grad and vmap",
    "torch.autograd.forward_ad._current_level": "models inside forward-mode differentiation",
    "torch._C._current_graph_task_id": "distinguishing a recomputed block from a first pass",
    "torch._C._autograd._top_saved_tensors_default_hooks": "a loss or a model inside a "
    "checkpoint, which computes it again",
    "torch._native_multi_head_attention": "torch's fast attention under context parallelism",
    "torch._transformer_encoder_layer_fwd": "torch's fast encoder under context parallelism",
    "torch.ops.aten._local_scalar_dense": "reading a value that is not there",
    "torch._ops.OpOverload.overloadpacket": "the formula of an operator's work",
    **{
        f"torch.ops.aten.{name}_backward": "the same"
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        )
    },
    "torch.ops.aten._scaled_mm": "what selective recompute keeps",
    "torch._scaled_mm": "matrix products in fp8",
    "torch.ops.aten._flash_attention_forward": "attention over true lengths on a GPU",
    **{f"torch.ops.aten.{name}": "what selective recompute keeps" for name in _EXPENSIVE},
}

_aten = torch.ops.aten
EXPENSIVE_OPERATORS = tuple(getattr(_aten, name).default for name in _EXPENSIVE)
"""Matrix products over experts, and attention in one kernel, as autograd sees them."""
SCALED_PRODUCT = _aten._scaled_mm.default
"""A matrix product in fp8."""
ATTENTION_PASSES = frozenset(
    getattr(_aten, f"{name}{end}") for name in _EXPENSIVE[1:3] for end in ("", "_backward")
)
"""Attention in one kernel of a GPU, forward and backward."""
READ_VALUE = _aten._local_scalar_dense.default
"""What ``tensor.item()`` and ``if tensor`` call."""
FUSED_ATTENTIONS = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
"""Functions in which torch's own layers compute attention and more in one call."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, **scale: Any
) -> Tensor:
    """Attention without a mask, as a GPU's kernel computes it; works without values."""
    kernel = _aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, dropout, is_causal, **scale)[0]


def attend_with_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    **scale: Any,
) -> Tensor:
    """The same with a bias, or in fp32."""
    kernel = _aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, True, dropout, is_causal, **scale)[0]


def get_packet(operator: Any) -> Any:
    """An operator without regard to its overload."""
    return operator.overloadpacket


def get_schema(operator: Any) -> Any:
    """An operator's name, arguments and results; None for a plain function."""
    return getattr(operator, "_schema", None)


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes into its arguments; without an overload, any of its own may."""
    names: list[str] = getattr(operator, "overloads", list)()
    overloads = [getattr(operator, name) for name in names] or [operator]
    return any(schema.is_mutable for schema in filter(None, map(get_schema, overloads)))


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, tensors bypass ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


def without_torch_dispatch() -> AbstractContextManager[Any]:
    """Inside, tensors bypass ``__torch_dispatch__``."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python))


def get_function_mode() -> Any:
    """The innermost mode that sees calls of torch's functions; None without one."""
    return torch.overrides._get_current_function_mode()


def is_in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def has_saved_tensor_hooks() -> bool:
    """Whether something, such as a checkpoint, handles the tensors that autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


HAS_PYTHON_APPLY = inspect.ismethod(torch.autograd.Function.apply)
"""Before torch 2.15; looked at once, since replacing it makes it one of Python's."""
_REPLACED: Any = _SingleLevelFunction if HAS_PYTHON_APPLY else torch.autograd.Function
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


def _apply_converted(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # Again and again: logits that are computed late may still lack padding.
    while any(type(argument) in _CONVERSIONS for argument in args):
        before = args
        args = tuple(
            _CONVERSIONS[type(argument)](cls, argument)
            if type(argument) in _CONVERSIONS
            else argument
            for argument in args
        )
        if all(map(operator.is_, before, args)):
            break
    return super(_REPLACED, cls).apply(*args, **kwargs)


_CONVERTING = Patch(lambda: [Entry(_REPLACED, "apply", lambda _: classmethod(_apply_converted))])


def find_unknown_functions() -> str | None:
    """Why the arguments of autograd functions cannot be converted; None if they can."""
    inherits = "apply" not in vars(_SingleLevelFunction) or _CONVERTING.is_made
    if not HAS_PYTHON_APPLY or (
        torch.autograd.Function.__mro__[1] is _SingleLevelFunction and inherits
    ):
        return None
    return (
        f"torch.autograd.Function of torch {torch.__version__} does not inherit apply from a class "
        f"without one, as in torch {KNOWN['torch']}"
    )


def attend_with_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    dropout: float,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """[tokens, heads, size] -> the same. Ends and longest rows are those of queries and of keys;
    ends are int32 and begin with 0.

    ``torch.nn.attention.varlen.varlen_attn`` calls the same kernel, but without dropout, and takes
    fewer key and value heads than query heads from torch 2.12 on only.
    """
    before, after = window
    # Not "causal", which is a constant of a compiled graph: the kernel reads it off the window.
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *ends, *longest, dropout, False, False,
        scale=scale, window_size_left=before, window_size_right=after,
    )[0]  # fmt: skip


def differentiate_softmax(gradient: Tensor, output: Tensor) -> Tensor:
    """The gradient of a softmax over the last dimension, from that of its output."""
    found: Tensor = torch._softmax_backward_data(gradient, output, -1, output.dtype)
    return found


def multiply_scaled(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    *,
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """``(left * left_scale) @ (right * right_scale)``; ``is_fast`` sums with fewer bits.

    The kernel wants rows of ``left`` and columns of ``right`` contiguous, and 16 divides its inner
    and right sizes. On a CPU the product is computed in fp32: for tests of numerics.
    """
    if left.device.type != "cuda":
        with torch.autocast(left.device.type, enabled=False):
            product = left.float() @ right.float() * (left_scale * right_scale)
        return product.to(dtype)
    return torch._scaled_mm(
        left.contiguous(), right.t().contiguous().t(), scale_a=left_scale, scale_b=right_scale,
        out_dtype=dtype, use_fast_accum=is_fast,
    )  # fmt: skip


def is_transformed() -> bool:
    """Whether ``torch.func``, forward-mode differentiation or ``torch.export`` runs the call."""
    is_function = torch._C._functorch.peek_interpreter_stack() is not None
    return is_function or forward_ad._current_level >= 0 or torch.compiler.is_exporting()
