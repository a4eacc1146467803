"""A padded batch without its padding: where the real tokens are, and the way there and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The real tokens of a batch, laid end to end."""

    shape: tuple[int, int]
    """Rows and columns of the padded batch."""
    places: Tensor
    """The place of each real token among all of them."""
    lengths: list[int]
    """Real tokens per row."""
    _packed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    @staticmethod
    def read(mask: Tensor) -> Rows:
        """The rows of a mask [batch, tokens] that marks real tokens."""
        places = mask.flatten().nonzero().squeeze(1)
        return Rows((mask.shape[0], mask.shape[1]), places, mask.sum(1).tolist())

    @property
    def columns(self) -> Tensor:
        """The column that each real token has in the padded batch."""
        return self.places % self.shape[1]

    def is_padded(self, tensor: Tensor) -> bool:
        """Whether it has a value for every place of the padded batch."""
        return tensor.dim() > 1 and tuple(tensor.shape[:2]) == self.shape

    def pack(self, tensor: Tensor) -> Tensor:
        """[batch, tokens, ...] -> [1, real tokens, ...]."""
        packed: Tensor = _Pack.apply(tensor.flatten(0, 1), self.places)  # type: ignore[no-untyped-call]
        return packed[None]

    def unpack(self, tensor: Tensor) -> Tensor:
        """[1, real tokens, ...] -> [batch, tokens, ...], with zeros for padding."""
        size = self.shape[0] * self.shape[1]
        padded: Tensor = _Unpack.apply(tensor[0], self.places, size)  # type: ignore[no-untyped-call]
        return padded.view(*self.shape, *tensor.shape[2:])

    def pack_beside(self, value: Any) -> Any:
        """What a block gets beside its hidden states, such as positions: tensors per token."""
        if isinstance(value, tuple):
            return tuple(self.pack_beside(each) for each in value)
        # Not of four dimensions, where the second one is that of heads: there may be as many.
        if not isinstance(value, Tensor) or value.dim() not in (2, 3):
            return value
        if value.shape[0] not in (1, self.shape[0]) or value.shape[1] != self.shape[1]:
            return value
        # The same for every block, so done once. It holds the tensor: an id may be used again.
        if id(value) not in self._packed:
            whole = value.expand(self.shape[0], *value.shape[1:])
            self._packed[id(value)] = value, self.pack(whole)
        return self._packed[id(value)][1]


class _Pack(torch.autograd.Function):
    """A copy in both directions: the gradient of index_select would be a slow index_add."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(padded)
        return padded.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return _Unpack.apply(gradient, places, ctx.size), None  # type: ignore[no-untyped-call]


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return packed.new_zeros((size, *packed.shape[1:])).index_copy_(0, places, packed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return _Pack.apply(gradient, places), None, None  # type: ignore[no-untyped-call]


MayAttend = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask functions: (row, head, query's column, key's column) -> may it attend?"""


@dataclass(frozen=True)
class RowMask:
    """Takes the place of an attention mask: which rows there are, and who attends to whom in one.

    The model itself passes it to every block and from there to attention, so a block that is
    computed again in the backward pass has it too.
    """

    rows: Rows
    may_attend: MayAttend
    is_causal: bool
    is_full: bool
    _masks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def get_mask(self, row: int) -> Tensor | None:
        """Of one row, [length, length]; None if ``is_causal`` or ``is_full`` says it all."""
        if self.is_causal or self.is_full:
            return None
        if row not in self._masks:
            start = sum(self.rows.lengths[:row])
            columns = self.rows.columns[start : start + self.rows.lengths[row]]
            number = torch.zeros((), dtype=torch.long, device=columns.device)
            mask = self.may_attend(number + row, number, columns[:, None], columns[None])
            self._masks[row] = mask.expand(len(columns), len(columns))
        return self._masks[row]
