"""Split tensors in a script's own code, as if they were whole: items, and masks of plain tensors.

``p.grad[:10] = 0``, ``p.grad[:10].zero_()`` and ``p.grad.mul_(mask)`` are written for whole
tensors. torch has no sharding for the first, works on a copy in the second and refuses the third.
Here every rank changes its own slice; only reading items asks the other ranks for theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import EllipsisType, NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rapidformer.accel.split.on_demand import IN_PLACE
from rapidformer.accel.weights import find_spans
from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.compat.torch_tensors import FACTS, get_base
from rapidformer.dist.whole import join_whole
from rapidformer.errors import RapidformerError

Step = Callable[[Tensor], Any]
_PLACES = (int, slice, NoneType, EllipsisType)
"""An index of these is a view of a tensor; any other makes a copy."""
_ELEMENTWISE = {
    "__mul__": "mul_", "__rmul__": "mul_", "mul": "mul_", "__imul__": "mul_", "mul_": "mul_",
    "__add__": "add_", "__radd__": "add_", "add": "add_", "__iadd__": "add_", "add_": "add_",
    "__sub__": "sub_", "sub": "sub_", "__isub__": "sub_", "sub_": "sub_",
    "__truediv__": "div_", "div": "div_", "__itruediv__": "div_", "div_": "div_",
    "masked_fill": "masked_fill_", "masked_fill_": "masked_fill_", "copy_": "copy_",
}  # fmt: skip
"""Methods, and what does the same in place."""


def find_places(tensor: Tensor) -> tuple[Tensor, ...]:
    """Where this rank's slice is in the whole tensor: an index for each dimension."""
    rows = [torch.cat([torch.arange(*span) for span in spans]) for spans in find_spans(tensor)]
    # Shaped so that they are combined with each other, without a list of all combinations.
    sizes = torch.eye(len(rows), dtype=torch.long).mul(-2).add(1).tolist()
    return tuple(row.view(size).to(tensor.device) for row, size in zip(rows, sizes, strict=True))


def _change(split: Any, step: Step) -> Any:
    """Let a step change the whole tensor in place; every rank keeps its own slice of the result.

    What other ranks hold is 0: no element depends on another.
    """
    with torch.no_grad():
        local, places = split.to_local(), find_places(split)
        whole = local.new_zeros(split.shape)
        whole[places] = local
        step(whole)
        local.copy_(whole[places])
    return split


def _is_recorded(split: Tensor) -> bool:
    return torch.is_grad_enabled() and split.requires_grad


def _set_items(self: Any, index: Any, value: Any) -> None:
    if _is_recorded(self):
        Tensor.__setitem__(self, index, value)  # refused, or recorded, by torch
        return
    place, items = tree_map_only(DTensor, join_whole, (index, value))
    _change(self, lambda whole: whole.__setitem__(place, items))


def _get_items(self: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if _is_recorded(self) or not all(isinstance(part, _PLACES) for part in parts):
        return Tensor.__getitem__(self, index)
    shape = torch.empty(self.shape, device="meta")[index].shape
    return _Items.build(
        self.to_local().new_zeros(()).expand(shape),
        lambda: join_whole(self)[index],
        lambda step: _change(self, lambda whole: step(whole[index])),
    )


def _build_method(name: str, _: Any) -> Callable[..., Any]:
    """A method of split tensors that takes plain ones, which are the same on every rank."""
    own, step = getattr(Tensor, name), getattr(Tensor, _ELEMENTWISE[name])

    def call(self: Any, *args: Any, **options: Any) -> Any:
        tensors = [v for v in (*args, *options.values()) if isinstance(v, Tensor) and v.dim()]
        if all(isinstance(tensor, DTensor) for tensor in tensors) or _is_recorded(self):
            return own(self, *args, **options)
        args, options = tree_map_only(DTensor, join_whole, (args, options))
        target = self if IN_PLACE.fullmatch(name) else self.detach().clone()
        return _change(target, lambda whole: step(whole, *args, **options))

    return call


def _build_data(before: Any) -> property:
    """``p.data`` as it is; torch would leave a split tensor as it is if one is assigned."""
    plain: Any = before or Tensor.data

    def refuse(self: Any, value: Tensor) -> NoReturn:
        raise RapidformerError(
            f"`p.data = tensor` cannot change a tensor of shape {tuple(self.shape)} that is split "
            "over ranks. Copy the values: p.data.copy_(tensor). To exchange two sets of weights, "
            "copy one of them first: kept = p.data.clone()."
        )

    return property(plain.__get__, refuse)


CHANGING_ITEMS = Patch(
    lambda: [
        Entry(DTensor, "__setitem__", lambda _: _set_items),
        Entry(DTensor, "__getitem__", lambda _: _get_items),
        Entry(DTensor, "data", _build_data),
        *[Entry(DTensor, name, partial(_build_method, name)) for name in _ELEMENTWISE],
    ]
)
"""Inside, split tensors can be changed like whole ones."""


class _Items(Tensor):
    """Some items of a split tensor, or a view of them: written to each rank's slice of it."""

    _read: Callable[[], Tensor]
    _write: Callable[[Step], object]

    @staticmethod
    def build(like: Tensor, read: Callable[[], Tensor], write: Callable[[Step], object]) -> Any:
        items: Any = like.as_subclass(_Items)
        items._read, items._write = read, write
        return items

    def full_tensor(self) -> Tensor:
        """The items as a plain tensor; all ranks that hold a slice must call this."""
        return self._read()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FACTS:
            return super().__torch_function__(func, types, args, kwargs or {})
        items = args[0] if args and isinstance(args[0], cls) else None
        start = 0 if items is None else 1
        rest, options = tree_map_only(cls, cls.full_tensor, (args[start:], kwargs or {}))
        if items is None:
            return func(*rest, **options)
        if IN_PLACE.fullmatch(func.__name__):
            items._write(lambda part: func(part, *rest, **options))
            return items
        whole = items._read()
        result = func(whole, *rest, **options)
        if not isinstance(result, Tensor) or get_base(result) is not get_base(whole):
            return result
        return cls.build(
            whole.new_zeros(()).expand(result.shape),
            lambda: func(items._read(), *rest, **options),
            lambda step: items._write(lambda part: step(func(part, *rest, **options))),
        )
