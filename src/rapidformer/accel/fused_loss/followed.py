"""Operations on deferred logits that do not compute them: losses, and what models do before one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.fused_loss.chunked import Losses, Recipe, Step, compute_losses
from rapidformer.accel.fused_loss.deferred import DTYPES, FOLLOWED, DeferredLogits, build
from rapidformer.accel.fused_loss.divergence import Teacher
from rapidformer.accel.fused_loss.head import Head
from rapidformer.accel.fused_loss.noted import is_noting
from rapidformer.compat.torch_dispatch import has_saved_tensor_hooks
from rapidformer.compat.torch_tensors import get_storage_key

_NO_LABEL = -(2**63)
"""Where every index is that of a word."""


def defer(head: Head, hidden: Tensor, width: int, dtype: torch.dtype) -> DeferredLogits:
    """The outputs of ``head`` for ``hidden``, not computed yet."""
    layout = torch.empty(*hidden.shape[:-1], width, dtype=dtype, device="meta")
    return build(head, hidden, layout, ())


def _compute_loss(
    func: Any, logits: DeferredLogits, target: Tensor, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """``functional.cross_entropy`` chunk by chunk."""
    is_plain = weight is None and size_average is None and reduce is None
    is_labelled = not target.is_floating_point() and target.shape == logits.shape[:-1]
    is_known = is_plain and is_labelled and reduction in ("none", "mean", "sum")
    if not is_known or logits.dim() != 2 or not _can_follow(logits):
        return NotImplemented
    is_by_row = reduction == "none"
    noted: list[Tensor] | None = [] if is_noting() and not is_by_row else None
    recipe = Recipe(ignore_index, label_smoothing, is_by_row=is_by_row, noted=noted)
    losses = compute_logit_losses(logits, target, recipe).values
    return losses / (target != ignore_index).sum() if reduction == "mean" else losses


def compute_logit_losses(
    logits: Tensor, labels: Tensor, recipe: Recipe, teacher: Tensor | None = None
) -> Losses:
    """The losses of logits, [rows, words], deferred or not; ``teacher`` has logits as well."""
    other = None if teacher is None else _build_teacher(teacher)
    if isinstance(logits, DeferredLogits) and _can_follow(logits):
        recipe = replace(recipe, steps=_list_steps(logits))
        return logits.head.compute_losses(logits.get_hidden(), labels, recipe, other)
    if isinstance(logits, DeferredLogits):
        logits = logits.compute()
    return compute_losses(logits, None, None, labels, recipe, other)


def _build_teacher(logits: Tensor) -> Teacher:
    if not isinstance(logits, DeferredLogits):
        return Teacher(logits)
    if not _can_follow(logits) or logits.head.lend is None:
        return Teacher(logits.compute())
    weight, bias, words = logits.head.lend()
    return Teacher(logits.get_hidden(), weight, bias, _list_steps(logits), words)


def _can_follow(logits: DeferredLogits) -> bool:
    """Whether losses can be computed from the hidden states."""
    # A checkpoint runs a loss twice and must save the same both times, even if the logits were
    # computed in between.
    is_free = not logits.is_computed and not has_saved_tensor_hooks()
    return is_free and _log_softmax not in logits.steps


def _list_steps(logits: DeferredLogits) -> tuple[Step, ...]:
    # Widening to fp32 is not a step: losses are computed in fp32 anyway.
    return () if set(logits.steps) <= {Tensor.float} else logits.steps


def _normalize(func: Any, logits: DeferredLogits, dim: Any = None, **kwargs: Any) -> Any:
    """``log_softmax``: noted, since the log-probabilities of labels may be all that is read."""
    is_plain = kwargs.get("dtype") is None and dim in (-1, logits.dim() - 1)
    return _change(logits, _log_softmax) if is_plain and _can_follow(logits) else NotImplemented


def _log_softmax(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits, -1)


def _pick(func: Any, logits: DeferredLogits, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """``log_softmax(logits, -1).gather(-1, labels[..., None])``, chunk by chunk."""
    is_by_row = dim in (-1, logits.dim() - 1) and index.shape == (*logits.shape[:-1], 1)
    *steps, last = logits.steps or (None,)
    if last is not _log_softmax or not is_by_row or kwargs or has_saved_tensor_hooks():
        return NotImplemented
    hidden, layout = (each.flatten(0, -2) for each in (logits.get_hidden(), logits.strided))
    before = build(logits.head, hidden, layout, tuple(steps))
    losses = compute_logit_losses(before, index.flatten(), Recipe(_NO_LABEL, is_by_row=True)).values
    return losses.neg().view(index.shape).to(logits.dtype)


def _reshape(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """``view``, ``reshape`` and ``flatten``, if they keep the last dimension."""
    if not all(isinstance(size, (int, tuple, list)) for size in (*args, *kwargs.values())):
        return NotImplemented  # a dtype
    layout = func(logits.strided, *args, **kwargs)
    if not layout.dim() or layout.shape[-1] != logits.shape[-1]:
        return NotImplemented
    # Not ``func``: hidden states need not have the logits' strides.
    hidden = logits.get_hidden()
    hidden = hidden.reshape(*layout.shape[:-1], hidden.shape[-1])
    return _move(logits, hidden, lambda x: func(x, *args, **kwargs))


def _index(func: Any, logits: DeferredLogits, index: Any) -> Any:
    """Slices that keep the last dimension, such as ``logits[:, :-1]``."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return NotImplemented
    slices = [part for part in parts if part is not Ellipsis]
    touches_words = len(slices) == logits.dim() or Ellipsis in parts[:-1]
    if touches_words and slices[-1:] != [slice(None)]:
        return NotImplemented
    return _move(logits, logits.get_hidden()[index], lambda x: x[index])


def _make_contiguous(func: Any, logits: DeferredLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if logits.strided.is_contiguous():
        return logits
    return _move(logits, logits.get_hidden().contiguous(), Tensor.contiguous)


def _cast(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """``float`` and ``to``: note the cast as a step."""
    # Try the call on one element, to see which dtype and device it asks for.
    element = torch.empty((), dtype=logits.dtype, device=logits.device)
    kind = func(element, *args, **kwargs)
    if kind is element:
        return logits
    if kind.device != logits.device or kind.dtype not in DTYPES or kind.dtype == logits.dtype:
        return NotImplemented
    is_widened = kind.dtype == torch.float32
    step = Tensor.float if is_widened else lambda x: x.to(kind.dtype)
    return _change(logits, step, kind.dtype)


def _apply(func: Any, logits: DeferredLogits, *factor: Any, **kwargs: Any) -> Any:
    """Products with a number, and ``tanh``."""
    if not all(isinstance(number, (int, float)) for number in factor) or kwargs:
        return NotImplemented
    return _change(logits, lambda x: func(x, *factor))


def _move(logits: DeferredLogits, hidden: Tensor, look: Step) -> DeferredLogits:
    """Logits in another shape, or some of their rows: a view or a copy, as torch decides."""
    layout = look(logits.strided)
    moved = build(logits.head, hidden, layout, logits.steps)
    if get_storage_key(layout) == get_storage_key(logits.strided):
        logits.add_view(moved, look)
    return moved


def _change(logits: DeferredLogits, step: Step, dtype: torch.dtype | None = None) -> Tensor:
    """Logits after one more step, in their own memory."""
    layout = torch.empty_like(logits.strided, dtype=dtype)
    return build(logits.head, logits.get_hidden(), layout, (*logits.steps, step))


FOLLOWED.update({
    functional.cross_entropy: _compute_loss,
    functional.log_softmax: _normalize, torch.log_softmax: _normalize,
    Tensor.log_softmax: _normalize,
    torch.gather: _pick, Tensor.gather: _pick,
    Tensor.view: _reshape, Tensor.reshape: _reshape,
    Tensor.flatten: _reshape, torch.flatten: _reshape,
    Tensor.__getitem__: _index,
    Tensor.contiguous: _make_contiguous,
    Tensor.float: _cast, Tensor.to: _cast,
    Tensor.mul: _apply, Tensor.__mul__: _apply, Tensor.__rmul__: _apply,
    Tensor.div: _apply, Tensor.__truediv__: _apply,
    torch.mul: _apply, torch.div: _apply,
    Tensor.tanh: _apply, torch.tanh: _apply,
})  # fmt: skip
