"""Logits that are computed only if something other than a cross entropy needs them.

In training, the head returns ``DeferredLogits``. They know their shape, record the reshaping,
shifting and scaling that models and losses do, and compute a cross entropy chunk by chunk. Any
other operation computes all of them, as the head would have. So a model's own loss, a user's loss
over ``outputs.logits`` and an accuracy printed now and then all work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fused_loss.chunked import Recipe, Step
from rapidformer.accel.watched import is_from_user
from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.compat.torch_tensors import FACTS
from rapidformer.errors import ConfigurationError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that can be deferred. Losses are computed in fp32."""

ComputeLoss = Callable[[Tensor, Tensor, Recipe], Tensor]
"""Rows of hidden states, their labels, a recipe -> the sum of the losses."""


class Head:
    """The two ways to use a linear head."""

    def __init__(self, compute: Callable[[Tensor], Tensor], compute_loss: ComputeLoss) -> None:
        self.compute = compute
        self.compute_loss = compute_loss


class DeferredLogits(torch.Tensor):
    """The outputs of a head that has not been applied yet."""

    _head: Head
    _hidden: Tensor
    """Same shape as the logits, except for the last dimension."""
    _steps: tuple[Step, ...]
    _computed: Tensor | None
    _is_followed: bool
    """Whether something was derived without computing the logits: it is too late for hooks then."""

    def get_hidden(self) -> Tensor:
        """What the head is applied to.

        Its gradient runs the hooks that were registered on the logits: FSDP puts one on every
        output of the model, to gather weights.
        """
        self._is_followed = True
        hidden: Tensor = _Through.apply(self._hidden, self)  # type: ignore[no-untyped-call]
        return hidden

    def compute(self) -> Tensor:
        """The logits as a plain tensor, with their gradient."""
        if self._computed is not None:
            return self._computed
        # With a gradient even under no_grad: the result is kept, and a loss may use it later.
        with torch.enable_grad():
            logits = self._head.compute(_Through.apply(self._hidden, self))  # type: ignore[no-untyped-call]
            for step in self._steps:
                logits = step(logits)
        if not torch.is_inference_mode_enabled():
            self._computed = logits
        return logits

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS or (func is Tensor.register_hook and not is_from_user(args[1])):
            return super().__torch_function__(func, types, args, kwargs)
        if func in (Tensor.register_hook, Tensor.retain_grad) and args[0]._is_followed:
            raise ConfigurationError(
                "The gradient of the logits was asked for, but their loss was computed without "
                "them. Set --fused-loss off."
            )
        follow = _FOLLOWED.get(func)
        if follow is not None and args and isinstance(args[0], cls) and args[0]._computed is None:
            result = follow(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs))
        return func(*args, **kwargs)


def defer(
    head: Head, hidden: Tensor, width: int, dtype: torch.dtype, steps: tuple[Step, ...] = ()
) -> DeferredLogits:
    """The outputs of ``head`` for ``hidden``, not computed yet."""
    # One value, expanded, takes no memory. Only autograd sees it, to run hooks.
    stand_in = _StandIn.apply(hidden, width, dtype)  # type: ignore[no-untyped-call]
    logits: DeferredLogits = stand_in.as_subclass(DeferredLogits)
    logits._head, logits._hidden, logits._steps = head, hidden, steps
    logits._computed, logits._is_followed = None, False
    return logits


class _StandIn(torch.autograd.Function):
    """A tensor with the logits' shape and place in the autograd graph, but without values."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        value = torch.full((), float("nan"), dtype=dtype, device=hidden.device)
        return value.expand(*hidden.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # ``_Through`` sends one zero, expanded. Any other gradient comes from a custom autograd
        # function, which bypasses ``__torch_function__`` and took this for real logits.
        if any(gradient.stride()) and bool(gradient.any()):
            raise ConfigurationError(
                "The logits were used by a torch.autograd.Function, which --fused-loss cannot "
                "follow. Pass it a copy, outputs.logits.clone(), or set --fused-loss off."
            )
        return None, None, None


class _Through(torch.autograd.Function):
    """Passes hidden states on as if they came from the logits, so that hooks on the logits run."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, gradient.new_zeros((), dtype=ctx.dtype).expand(ctx.shape)


# ---- operations on logits that do not compute them -----------------------------------------------
#
# Each returns NotImplemented if the logits must be computed after all.


def _compute_loss(
    func: Any,
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``functional.cross_entropy`` chunk by chunk."""
    is_plain = weight is None and size_average is None and reduce is None
    is_labelled = not target.is_floating_point() and target.shape == logits.shape[:-1]
    if not is_plain or not is_labelled or logits.dim() != 2 or reduction not in ("mean", "sum"):
        return NotImplemented
    # Widening to fp32 is not a step: the loss is computed in fp32 anyway.
    steps = () if set(logits._steps) <= {Tensor.float} else logits._steps
    recipe = Recipe(ignore_index=ignore_index, label_smoothing=label_smoothing, steps=steps)
    total = logits._head.compute_loss(logits.get_hidden(), target, recipe)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _reshape(func: Any, logits: DeferredLogits, *shape: Any, **kwargs: Any) -> Any:
    """``view`` and ``reshape``, if they keep the last dimension."""
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else [*shape]
    width = logits.shape[-1]
    rows = logits._hidden.shape[:-1].numel()
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if sizes[-1] == -1:
        known = -torch.Size(sizes).numel()
        sizes[-1] = width if known and rows == known else 0
    if sizes[-1] != width:
        return NotImplemented
    return _replace(logits, func(logits.get_hidden(), [*sizes[:-1], logits._hidden.shape[-1]]))


def _flatten(func: Any, logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return _replace(logits, func(logits.get_hidden(), start_dim, end_dim))


def _index(func: Any, logits: DeferredLogits, index: Any) -> Any:
    """Slices that keep the last dimension, such as ``logits[:, :-1]``."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return NotImplemented
    slices = [part for part in parts if part is not Ellipsis]
    touches_words = len(slices) == logits.dim() or Ellipsis in parts[:-1]
    if touches_words and slices[-1:] != [slice(None)]:
        return NotImplemented
    return _replace(logits, logits.get_hidden()[index])


def _make_contiguous(func: Any, logits: DeferredLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if logits._hidden.is_contiguous():
        return logits
    return _replace(logits, logits.get_hidden().contiguous())


def _cast(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """``float`` and ``to``: note the cast as a step."""
    # Try the call on one element, to see which dtype and device it asks for.
    kind = func(torch.empty((), dtype=logits.dtype, device=logits.device), *args, **kwargs)
    if kind.device != logits.device or kind.dtype not in DTYPES:
        return NotImplemented
    if kind.dtype == logits.dtype:
        return logits
    is_widened = kind.dtype == torch.float32
    return _replace(
        logits,
        dtype=kind.dtype,
        step=Tensor.float if is_widened else lambda x: x.to(kind.dtype),
    )


def _scale(func: Any, logits: DeferredLogits, factor: Any = None, **kwargs: Any) -> Any:
    if not isinstance(factor, (int, float)) or kwargs:
        return NotImplemented
    return _replace(logits, step=lambda x: func(x, factor))


def _apply_tanh(func: Any, logits: DeferredLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _replace(logits, step=func)


def _replace(
    logits: DeferredLogits,
    hidden: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    step: Step | None = None,
) -> DeferredLogits:
    hidden = logits.get_hidden() if hidden is None else hidden
    steps = logits._steps if step is None else (*logits._steps, step)
    return defer(logits._head, hidden, logits.shape[-1], dtype or logits.dtype, steps)


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _compute_loss,
    Tensor.view: _reshape, Tensor.reshape: _reshape,
    Tensor.flatten: _flatten, torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.contiguous: _make_contiguous,
    Tensor.float: _cast, Tensor.to: _cast,
    Tensor.mul: _scale, Tensor.__mul__: _scale, Tensor.__rmul__: _scale,
    Tensor.div: _scale, Tensor.__truediv__: _scale,
    torch.mul: _scale, torch.div: _scale,
    Tensor.tanh: _apply_tanh, torch.tanh: _apply_tanh,
}  # fmt: skip
