"""What passes are compared under that differ only in added columns (``widths.py``).

Nothing in them is random, experts do not change where two are equally good, what belongs to no
token is NaN, and an index out of bounds is an error that the process survives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from rapidformer.accel.cuda_graph.columns import Columns
from rapidformer.accel.fused_loss.deferred import DeferredLogits
from rapidformer.compat.torch_dispatch import TorchDispatchMode
from rapidformer.data.batch import count_rows
from rapidformer.data.nested import map_tensors

_DROPOUT = functional.dropout
"""As modes see it, also where something else takes its place."""
_BY_ROW = {"embedding", "embedding_bag"}
_BY_DIM = {
    "gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy",
    "index_fill", "index_reduce",
}  # fmt: skip
_BY_DIMS = {"index", "index_put", "index_put_impl", "unsafe_index", "unsafe_index_put"}
_BY_CLASS = {"nll_loss_forward", "nll_loss2d_forward"}


class FactorsForDropout(TorchFunctionMode):
    """Instead of dropping values, each dropout multiplies by its own factor, whatever the width.

    In evaluation mode, two passes over a batch are equal, so a loss over their difference (R-Drop)
    would be zero at every width.
    """

    _calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DROPOUT:
            return result
        self._calls += 1
        return result * (1 + 0.5 * math.sin(self._calls))


class SameChoices(TorchFunctionMode):
    """Of experts that are equally good for a token, it keeps those that it has without padding.

    Between them, rounding decides. Any other change of choices stays, and shows in the results.
    """

    def __init__(self, batch: Any, rounding: float) -> None:
        super().__init__()
        self._rows, self._rounding = max(count_rows(batch), 1), rounding
        self._chosen: list[Tensor] = []
        self._known: Iterator[Tensor] | None = None

    def begin(self, *, is_wide: bool) -> None:
        """The call without added columns is the first."""
        self._known = iter(self._chosen) if is_wide else None
        if not is_wide:
            self._chosen.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        if self._known is None:
            self._chosen.append(result.indices)
            return result
        scores, dim = _read_topk(*args, **(kwargs or {}))
        narrow = next(self._known, result.indices)
        if dim not in (-1, scores.dim() - 1) or scores.shape[:-1] != result.indices.shape[:-1]:
            return result
        return self._choose(scores, narrow, result)

    def _choose(self, scores: Tensor, narrow: Tensor, result: Any) -> Any:
        chosen = self._place(narrow, result.indices).clamp(max=scores.shape[-1] - 1)
        values = scores.gather(-1, chosen)
        allowed = self._rounding * scores.detach().abs().amax(-1, keepdim=True)
        is_tie = ((values - result.values).detach().abs() <= allowed).all(-1, keepdim=True)
        pair = torch.where(is_tie, values, result.values), chosen.where(is_tie, result.indices)
        return torch.return_types.topk(pair)

    def _place(self, narrow: Tensor, wide: Tensor) -> Tensor:
        """``wide`` with what shorter rows have chosen, unless it is not clear where that is."""
        if narrow.shape == wide.shape:
            return narrow
        counts = (narrow[..., 0].numel(), wide[..., 0].numel())
        if narrow.shape[-1:] != wide.shape[-1:] or any(count % self._rows for count in counts):
            return wide
        placed = wide.clone()
        shorter = narrow.reshape(self._rows, -1, narrow.shape[-1])
        placed.view(self._rows, -1, wide.shape[-1])[:, : shorter.shape[1]] = shorter
        return placed


def _read_topk(input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> tuple[Tensor, int]:
    return input, dim


class NotForPadding:
    """Replaces by NaN what modules return to other code for added columns.

    A tensor has such columns if its shape differs from that in the same call without them: a
    classifier may have as many classes as a batch has columns.
    """

    def __init__(self, batch: Any, columns: Columns) -> None:
        self._added: dict[int, int] = {}
        """By the width of a tensor: the first column that was added."""
        for name, column in columns.items():
            width = batch[name].shape[1]
            self._added[column.width] = max(width, self._added.get(column.width, 0))
        self._is_wide = False
        self._shapes: list[torch.Size] = []
        """Of all tensors that were returned, in order, without added columns."""
        self._narrow = iter(self._shapes)
        self._depth = 0

    @contextmanager
    def act(self, *, is_wide: bool) -> Iterator[None]:
        """Inside, look at what modules return; call it without added columns first."""
        self._is_wide, self._narrow, self._depth = is_wide, iter(self._shapes), 0
        handles = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        return self._hide(output) if self._depth == 0 else None

    def _hide(self, output: Any) -> Any:
        if isinstance(output, Mapping):  # in place, as it keeps its type
            for name, value in output.items():
                output[name] = self._hide(value)  # type: ignore[index]
            return output
        return map_tensors(output, lambda _, tensor: self._hide_columns(tensor))

    def _hide_columns(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DeferredLogits):
            return tensor.map_hidden(self._hide_columns)  # nobody may ever need them
        # Tensors without values for padding look after themselves.
        is_lazy = type(tensor).__module__.startswith("rapidformer.accel.unpad")
        if is_lazy or not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        shape, first = tensor.shape, tensor.shape[1]
        if not self._is_wide:
            self._shapes.append(shape)  # and fill in nothing, with the operations of the other call
        elif shape != next(self._narrow, None):
            # Attention's weights have columns in two dimensions.
            first = self._added.get(shape[1], shape[1]) if tensor.dim() <= 3 else 0
        is_added = torch.arange(shape[1], device=tensor.device) >= first
        return tensor.masked_fill(is_added.view(1, -1, *[1] * (tensor.dim() - 2)), float("nan"))


class InBounds(TorchDispatchMode):
    """Raises for an index out of bounds, after which a GPU is of no more use to the process."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "overloadpacket", func).__name__.strip("_")
        if name in _BY_ROW:
            _check(args[1], len(args[0]))
        elif name in _BY_DIM:
            _check(args[2], args[0].shape[args[1]] if args[0].dim() else 1)
        elif name in _BY_DIMS:
            _check_dims(args[0], args[1])
        elif name in _BY_CLASS:
            _check(args[1], args[0].shape[min(args[0].dim() - 1, 1)], ignored=args[4])
        return func(*args, **(kwargs or {}))


def _check_dims(tensor: Tensor, indices: Sequence[Tensor | None]) -> None:
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            _check(index, tensor.shape[dim], least=-tensor.shape[dim])
        dim += index.dim() if index is not None and is_mask else 1


def _check(index: Tensor, size: int, *, least: int = 0, ignored: int | None = None) -> None:
    is_outside = (index < least) | (index >= size)
    wrong = index[is_outside if ignored is None else is_outside & (index != ignored)]
    if len(wrong):
        raise IndexError(f"index {int(wrong[0])} is out of bounds for size {size}")
