"""Operations on each token alone, for real tokens only; NotImplemented if padding matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.on_demand import Unpadded, lacks_padding, pick, settle
from rapidformer.accel.unpad.operations import FOLLOWED, FOLLOWED_PAIRS

_INPLACE = {
    **{getattr(functional, n): 1 for n in ("relu", "silu", "mish", "relu6", "hardswish")},
    functional.elu: 2, functional.leaky_relu: 2, functional.dropout: 3,
}  # fmt: skip
"""Activations that may write into what they are given, and where they take ``inplace``."""


def pick_labelled(hidden: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor] | None:
    """The rows of ``hidden``, [rows, size], that may have a label; None if padding has, too."""
    if not lacks_padding(hidden) or not hidden.is_flat:
        return None
    layout, rows = hidden.token_layout, hidden.token_layout.rows
    is_labelled = labels != ignored
    if not hidden.trusts_labels and (rows.is_filled or not layout.covers(is_labelled)):
        return None
    count = len(layout.places)
    chosen = layout.take(labels)[0, :count]
    if layout.is_cut:
        chosen = chosen.where(layout.select(is_labelled), ignored)
    return hidden.tokens[0, :count], chosen


def _apply(func: Any, x: Unpadded, *args: Any, **kwargs: Any) -> Any:
    """Functions of each number alone, casts included."""
    place = _INPLACE.get(func, 0)
    if kwargs.get("inplace") or (place and args[place - 1 : place] == (True,)):
        return func(settle(x), *args, **kwargs)
    if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        return NotImplemented
    result = _run(func, x, *args, **kwargs)
    return result if result.device == x.device else NotImplemented


def _cast(func: Any, x: Unpadded, other: Tensor) -> Any:
    """Casts to the type of another tensor, of which nothing else matters."""
    return _apply(Tensor.to, x, other.dtype) if other.device == x.device else NotImplemented


def _run(func: Any, x: Unpadded, *args: Any, **kwargs: Any) -> Tensor:
    """Run on the tokens alone."""
    tokens = func(x.tokens, *args, **kwargs)
    return x.derive(tokens, x.replay_later(func, (x, *args), kwargs))


def _combine(func: Any, left: Any, right: Any, *more: Any, **kwargs: Any) -> Any:
    """Functions of two numbers: of two tensors over the same tokens, or with one for all tokens."""
    if more:  # add(x, alpha, other), as torch had it once
        return NotImplemented
    x = left if isinstance(left, Unpadded) else right
    sides = [_fit(x, side) for side in (left, right)]
    if sides[0] is None or sides[1] is None:
        return NotImplemented
    if func in _PRODUCTS and not kwargs:
        other = right if x is left else left
        if _hides_padding(x, other):
            product = x.token_layout.spread(func(*sides), 0.0)
            return product.view(*x.lead, *product.shape[1:])
    tokens = func(*sides, **kwargs)
    if tokens.shape[:2] != x.tokens.shape[:2]:
        return NotImplemented
    return x.derive(tokens, x.replay_later(func, (left, right), kwargs))


def _fit(x: Unpadded, side: Any) -> Any:
    """An operand beside the tokens of ``x``; None if it does not fit."""
    if side is x:
        return x.tokens
    if isinstance(side, Unpadded):
        is_same = side.token_layout is x.token_layout and side.is_flat == x.is_flat
        # Dimensions are aligned at their ends, so both must have equally many.
        return side.tokens if is_same and side.dim() == x.dim() else None
    if not isinstance(side, Tensor):
        return side if isinstance(side, (int, float)) else None
    features = x.dim() - len(x.lead)
    if side.dim() <= features:
        return side
    if side.dim() > x.dim():
        return None
    side = side[(None,) * (x.dim() - side.dim())]
    lead, rest = side.shape[: len(x.lead)], side.shape[len(x.lead) :]
    if all(size == 1 for size in lead):
        return side.reshape(rest)
    if any(size not in (1, whole) for size, whole in zip(lead, x.lead, strict=True)):
        return None
    return x.token_layout.take(side.expand(*x.lead, *rest).reshape(x.token_layout.size, *rest))


def _hides_padding(x: Unpadded, mask: Any) -> bool:
    """Whether a factor is a mask with zeros for padding; waits for the device."""
    if not isinstance(mask, Tensor) or isinstance(mask, Unpadded) or mask.requires_grad:
        return False
    is_mask = mask.dim() == x.dim() and tuple(mask.shape[: len(x.lead)]) == x.lead
    if not is_mask or x.token_layout.rows.is_filled or not x.tokens.is_floating_point():
        return False
    return x.token_layout.covers((mask.reshape(x.token_layout.size, -1) != 0).any(-1))


def _reduce(place: int, default: int | None = None) -> Callable[..., Any]:
    """Functions along dimensions of a token, which stand at ``place`` among the arguments."""

    def follow(func: Any, x: Unpadded, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            return NotImplemented
        dims = kwargs.get("dim", args[place - 1] if len(args) >= place else default)
        many = dims if isinstance(dims, (tuple, list)) else (dims,)
        if not many or not all(type(dim) is int for dim in many):  # not var(True)
            return NotImplemented
        ends = [dim if dim < 0 else dim - x.dim() for dim in many]  # the same for tokens
        if min(ends) < len(x.lead) - x.dim():
            return NotImplemented
        dim = ends if isinstance(dims, (tuple, list)) else ends[0]
        if "dim" in kwargs or len(args) < place:
            given, named = args, {**kwargs, "dim": dim}
        else:
            given, named = (*args[: place - 1], dim, *args[place:]), kwargs
        result = func(x.tokens, *given, **named)
        replay = x.replay_later(func, (x, *args), kwargs)
        if isinstance(result, Tensor):
            return x.derive(result, replay)
        return type(result)([x.derive(r, pick(replay, n)) for n, r in enumerate(result)])

    return follow


def _project(func: Any, x: Unpadded, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Products with a matrix that all tokens share."""
    others = (weight, *args, *kwargs.values())
    is_shared = weight.dim() == 2 and not any(isinstance(other, Unpadded) for other in others)
    if x.dim() == len(x.lead) or not is_shared:
        return NotImplemented
    return _run(func, x, weight, *args, **kwargs)


def _normalize(func: Any, x: Unpadded, shape: Iterable[int], *args: Any, **kwargs: Any) -> Any:
    is_shared = not any(isinstance(other, Unpadded) for other in (*args, *kwargs.values()))
    if len(tuple(shape)) > x.dim() - len(x.lead) or not is_shared:
        return NotImplemented
    return _run(func, x, shape, *args, **kwargs)


def _reshape(func: Any, x: Unpadded, *args: Any, **kwargs: Any) -> Any:
    """Other shapes with the same order, if rows and columns stay, or become one dimension."""
    if any(isinstance(a, (torch.dtype, Tensor)) for a in (*args, *kwargs.values())):
        return NotImplemented
    shape = tuple(func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape)
    replay = x.replay_later(func, (x, *args), kwargs)
    for is_flat, lead in ((False, x.token_layout.grid), (True, (x.token_layout.size,))):
        rest = shape[len(lead) :]
        if shape[: len(lead)] == lead and math.prod(shape) == x.numel():
            if shape == tuple(x.shape) and is_flat == x.is_flat:
                return x.derive(x.tokens, replay)
            tokens = x.tokens.reshape(*x.tokens.shape[:2], *rest)
            return x.derive(tokens, replay, is_flat=is_flat)
    return NotImplemented


def _index(func: Any, x: Unpadded, index: Any) -> Any:
    """Features, columns and masked tokens; the first token of each row."""
    if isinstance(index, Tensor):
        return _select(x, index)
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(p is Ellipsis or type(p) in (slice, int) for p in parts):
        return NotImplemented
    if parts.count(Ellipsis) > 1:
        return NotImplemented
    where = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    missing = x.dim() - len([p for p in parts if p is not Ellipsis])
    parts[where : where + 1] = [slice(None)] * missing
    lead, rest = parts[: len(x.lead)], parts[len(x.lead) :]
    replay = x.replay_later(func, (x, index), {})
    if all(p == slice(None) for p in lead):
        return x.derive(x.tokens[(slice(None), slice(None), *rest)], replay)
    if x.is_flat or lead[0] != slice(None):
        return NotImplemented
    rows, column = x.token_layout.rows, lead[1]
    if column == 0 and type(column) is int and rows.starts_left and not x.token_layout.is_cut:
        return x.get_first()[(slice(None), *rest)]
    if isinstance(column, slice) and column.step in (None, 1) and rest == [slice(None)] * len(rest):
        start, stop, _ = column.indices(x.token_layout.grid[1])
        if start < stop:
            return x.derive(x.tokens, replay, layout=x.token_layout.cut(start, stop))
    return NotImplemented


def _select(x: Unpadded, mask: Tensor) -> Any:
    """``x[mask]``; like any such index, it waits for the device."""
    mask = settle(mask)
    if mask.dtype != torch.bool or tuple(mask.shape) != x.lead or x.token_layout.rows.is_filled:
        return NotImplemented
    mask = mask.reshape(-1)
    if not x.token_layout.covers(mask):
        return NotImplemented
    return x.tokens[0, : len(x.token_layout.places)][x.token_layout.select(mask)]


def _compute_loss(func: Any, x: Unpadded, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Cross entropies, of real tokens if only these have labels."""
    is_plain = not args and kwargs.get("reduction", "mean") in ("mean", "sum")
    if not is_plain or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return NotImplemented
    if not x.is_flat or x.dim() != 2 or type(target) is not Tensor or target.shape != x.shape[:1]:
        return NotImplemented
    picked = pick_labelled(x, target, kwargs.get("ignore_index", -100))
    return NotImplemented if picked is None else func(*picked, **kwargs)


def _create(func: Any, x: Unpadded, *args: Any, **kwargs: Any) -> Any:
    """New tensors of which ``x`` gives the dtype and maybe the shape, but no values."""
    if func.__name__.endswith("_like"):
        like = x.tokens.new_empty(()).expand(x.shape)
        return func(like, *args, **{"memory_format": torch.contiguous_format, **kwargs})
    return func(x.tokens, *args, **kwargs)


def _register(names: str, follow: Callable[..., Any]) -> None:
    table = FOLLOWED_PAIRS if follow is _combine else FOLLOWED
    for name in names.split():
        for place in (torch, Tensor, functional):
            if hasattr(place, name):
                table[getattr(place, name)] = follow


_register(
    "gelu relu silu mish tanh sigmoid softplus elu leaky_relu relu6 hardswish hardtanh logsigmoid "
    "dropout exp log log1p log2 sqrt rsqrt square abs neg __neg__ reciprocal erf sin cos pow "
    "__pow__ clamp clamp_min clamp_max float half bfloat16 double to clone contiguous detach",
    _apply,
)
_register("type_as", _cast)
_register(
    "add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ div __truediv__ true_divide "
    "__rtruediv__ eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ "
    "logical_and logical_or maximum minimum",
    _combine,
)
_PRODUCTS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_register(
    "mean sum var std softmax log_softmax logsumexp argmax argmin amax amin max min", _reduce(1)
)
_register("norm split chunk", _reduce(2))
_register("topk", _reduce(2, -1))
_register("linear matmul __matmul__", _project)
_register("layer_norm rms_norm", _normalize)
_register("view reshape flatten unflatten squeeze unsqueeze", _reshape)
_register(
    "new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like "
    "rand_like randn_like",
    _create,
)
_register("__getitem__", _index)
_register("cross_entropy nll_loss", _compute_loss)
