"""A padded batch without its padding: where the real tokens are, and the way back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rapidformer.accel.unpad.origin import Mask, MaskOrigin
from rapidformer.accel.unpad.places import gather, scatter, send
from rapidformer.compat.torch_tensors import count_changes

_MANY_ROWS = 16
"""From here on, a batch's tokens and longest row vary so little that finer sizes are few, too."""


class Sizes(NamedTuple):
    """What batches are rounded up to, at least: what the largest one of an update needs."""

    columns: int = 0
    labels: int = 0
    """Columns of the labels, which a decoder may have of its own."""
    tokens: int = 0
    bound: int = 0
    """Of a row's length, as ``Rows.bound``."""
    label_tokens: int = 0
    label_bound: int = 0


NO_SIZES = Sizes()


@dataclass
class Rows:
    """The real tokens of a batch, laid end to end.

    Not frozen: torch.compile compiles again if anything in a frozen object changes, used or not.
    """

    shape: tuple[int, int]
    """Rows and columns of the padded batch."""
    places: Tensor
    """The index of each real token in the flattened padded batch."""
    lengths: list[int]
    """Real tokens per row. If their number is rounded up, added rows follow."""
    columns: Tensor
    """The column of each real token in its row."""
    is_contiguous: bool
    """Whether no row has padding between its real tokens."""
    extra: int = 0
    """Zeros added to round the number of tokens up."""
    is_rounded: bool = False
    """Whether the number of tokens was rounded up to one of a few sizes."""
    is_filled: bool = False
    """Whether some of these tokens are padding, as rows of their own."""
    starts_left: bool = False
    """Whether every row has a real token in its first column."""
    other_bound: int = 0
    """The ``bound`` of the other side of an encoder-decoder model, if these rows are filled."""
    is_fixed: bool = False
    """Whether tensors are overwritten in place, so that ``lengths`` are from an earlier batch."""
    origin: MaskOrigin | None = field(default=None, compare=False)
    """Set if code of the user's own may use other masks (``origin.py``)."""
    packed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)
    """Arguments of blocks by their ids, as they are and packed."""

    @staticmethod
    def read(real: Mask, device: torch.device | None = None, *, rounds_up: bool = False) -> Rows:
        """The rows of a mask. ``rounds_up`` adds zeros to reach one of a few sizes."""
        places = torch.from_numpy(np.flatnonzero(real))
        rows = Rows(
            shape=(real.shape[0], real.shape[1]), places=places, lengths=real.sum(1).tolist(),
            columns=places % real.shape[1], is_contiguous=_is_contiguous(real),
            starts_left=bool(real[:, 0].all()),
        )  # fmt: skip
        return (rows._round_up() if rounds_up else rows).move_to(device)

    @staticmethod
    def read_packed(
        positions: Tensor, device: torch.device | None = None, *, rounds_up: bool = False
    ) -> Rows:
        """The examples of packed rows: each begins where positions, [batch, tokens], restart."""
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        places = torch.arange(positions.numel())
        starts = begins.flatten().nonzero().squeeze(1)
        ends = torch.cat([starts[1:], torch.tensor([positions.numel()])])
        columns = places - starts.repeat_interleave(ends - starts)
        shape = (positions.shape[0], positions.shape[1])
        rows = Rows(shape, places, (ends - starts).tolist(), columns, is_contiguous=True)
        return (rows._round_up() if rounds_up else rows).move_to(device)

    @staticmethod
    def read_filled(
        real: Mask, sizes_up: int = 0, least: Sizes = NO_SIZES, bounds: tuple[int, int] = (0, 0)
    ) -> Rows:
        """The rows of a mask in host memory, keeping enough padding to reach one of a few sizes.

        Unlike added zeros, padding has places in the batch. So there are as many places as tokens,
        and no tensor's size depends on how many of them are real. ``sizes_up`` picks a later size
        than the tokens or ``least`` need. ``bounds`` are those of both sides, if there are two.
        """
        places, padding = np.flatnonzero(real), np.flatnonzero(~real)
        # The sum of few rows varies more: fewer sizes, so that each comes again. Of two sides there
        # is a graph for each pair of sizes.
        sizes = 2 if any(bounds) else 8 if len(real) >= _MANY_ROWS else 4
        size = round_up(max(len(places), least.tokens), least=128, sizes=sizes)
        for _ in range(sizes_up):
            size = round_up(size + 1, least=128, sizes=sizes)
        padding = padding[: min(size, real.size) - len(places)]
        lengths: list[int] = real.sum(1).tolist()
        bound = bounds[0] or max(round_width(max(lengths), len(real)), least.bound)
        places = np.concatenate([places, padding])
        rows = Rows(
            shape=(real.shape[0], real.shape[1]), places=torch.from_numpy(places),
            lengths=lengths + _cut(len(padding), bound),
            columns=torch.from_numpy(places % real.shape[1]), is_contiguous=_is_contiguous(real),
            is_rounded=True, is_filled=True, starts_left=bool(real[:, 0].all()),
            other_bound=bounds[1],
        )  # fmt: skip
        # As many as if all of it were padding: the same for every batch of these sizes.
        most = len(lengths) + -(-size // bound)
        ends = rows._compute_ends(2 ** most.bit_length() - len(rows.lengths))
        rows.bound, rows.ends = bound, ends
        return rows

    def note_origin(self, mask: Tensor, is_real: Mask | None) -> None:
        """Use these rows only where a mask says the same as this one."""
        self.origin = MaskOrigin(mask, count_changes(mask), is_real)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Everything that Python code can see of filled rows."""
        sizes = (*self.shape, len(self.places), len(self.ends), self.bound, self.other_bound)
        return (*sizes, self.is_contiguous, self.starts_left)

    @property
    def each(self) -> tuple[Rows, ...]:
        """As ``Sides.each``."""
        return (self,)

    @property
    def rounded(self) -> tuple[int, int]:
        """The number of tokens, and the bound of a row's length."""
        return len(self.places), self.bound

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that differs between rows of the same ``sizes``."""
        return self.places, self.columns, self.ends

    def fix(self, places: Tensor, columns: Tensor, ends: Tensor) -> Rows:
        """The same rows with these ``tensors``, which may be overwritten in place."""
        fixed = replace(self, places=places, columns=columns, is_fixed=True, packed={})
        fixed.ends, fixed.bound = ends, self.bound
        return fixed

    def _round_up(self) -> Rows:
        count = len(self.places)
        added = _cut(round_up(count) - count, max(*self.lengths, 1))
        columns = torch.cat([self.columns, *map(torch.arange, added)])
        lengths = self.lengths + added
        return replace(self, lengths=lengths, columns=columns, extra=sum(added), is_rounded=True)

    def move_to(self, device: torch.device | None) -> Rows:
        """The same rows with their tensors on the device."""
        places, columns = send(self.places, device), send(self.columns, device)
        moved = replace(self, places=places, columns=columns)
        if self.is_filled:  # others compute these from their lengths
            moved.bound, moved.ends = self.bound, send(self.ends, device)
        return moved

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def bound(self) -> int:
        """A power of two that no row exceeds. Unlike ``longest``, it hardly ever changes."""
        return round_width(self.longest, self.shape[0])

    @cached_property
    def ends(self) -> Tensor:
        """Row ends after a leading 0, as fused kernels take them; if rounded, empty rows follow."""
        count = len(self.lengths)
        return self._compute_ends(2 ** count.bit_length() - count if self.is_rounded else 0)

    def _compute_ends(self, added: int) -> Tensor:
        ends = np.cumsum([0, *self.lengths, *[0] * added], dtype=np.int32)
        return send(torch.from_numpy(ends), self.places.device)

    def extend_ends(self, other: Rows) -> None:
        """Add empty rows until there are as many ``ends`` as in ``other``."""
        if len(self.ends) < len(other.ends):
            self.ends = self._compute_ends(len(other.ends) - 1 - len(self.lengths))

    @cached_property
    def numbers(self) -> Tensor:
        """The batch's row that each row lies in: rows that are packed or padding share them."""
        starts = torch.tensor(self.lengths).cumsum(0) - torch.tensor(self.lengths)
        starts = send(starts.clamp(max=len(self.places) - 1), self.places.device)
        return self.places[starts] // self.shape[1]

    @cached_property
    def dense(self) -> Tensor:
        """The index of each token in a flattened grid of rows x ``longest``."""
        lengths = torch.tensor(self.lengths)
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        start = (lengths.cumsum(0) - lengths)[row]
        place = row * self.longest + torch.arange(len(row)) - start
        return send(place, self.places.device)

    def is_padded(self, tensor: Tensor) -> bool:
        """Whether a tensor has a value for every position of the padded batch."""
        return tensor.dim() > 1 and tuple(tensor.shape[:2]) == self.shape

    def is_packed(self, tensor: Tensor) -> bool:
        """Whether a tensor has a value for every real token."""
        shape = (1, len(self.places) + self.extra)
        return tensor.dim() > 1 and tuple(tensor.shape[:2]) == shape

    def pack(self, tensor: Tensor) -> Tensor:
        """[batch, tokens, ...] -> [1, real tokens, ...]."""
        return Layout.of_rows(self).take(tensor.flatten(0, 1))

    def unpack(self, tensor: Tensor) -> Tensor:
        """[1, real tokens, ...] -> [batch, tokens, ...], with zeros for padding."""
        return Layout.of_rows(self).pad(tensor)

    def pack_argument(self, value: Any) -> Any:
        """An argument of a block other than hidden states, packed if it has a value per token."""
        if isinstance(value, tuple):
            return tuple(self.pack_argument(each) for each in value)
        # In four dimensions the second is heads, of which there may be as many as columns.
        if not isinstance(value, Tensor) or value.dim() not in (2, 3):
            return value
        if value.shape[0] not in (1, self.shape[0]) or value.shape[1] != self.shape[1]:
            return value
        # Blocks get the same tensors, so each is packed once. The tensor is kept too: its id could
        # be reused otherwise.
        if id(value) not in self.packed:
            whole = value.expand(self.shape[0], *value.shape[1:])
            self.packed[id(value)] = value, self.pack(whole)
        return self.packed[id(value)][1]

    def pad_argument(self, value: Any) -> Any:
        """The reverse, for a part of a block; also of what the block itself has computed."""
        if isinstance(value, tuple):
            return tuple(self.pad_argument(each) for each in value)
        for whole, packed in self.packed.values():
            if value is packed:
                return whole
        is_packed = isinstance(value, Tensor) and self.is_packed(value)
        return self.unpack(value) if is_packed else value


@dataclass(frozen=True)
class Sides:
    """The rows of a batch on both sides of a model."""

    encoder: Rows
    decoder: Rows

    @property
    def each(self) -> tuple[Rows, ...]:
        """The rows of one side after the other."""
        return self.encoder, self.decoder

    def move_to(self, device: torch.device | None) -> Sides:
        """The same sides with their tensors on the device."""
        return Sides(self.encoder.move_to(device), self.decoder.move_to(device))

    def fix(self, *tensors: Tensor) -> Sides:
        """The same sides with these ``tensors``, which may be overwritten in place."""
        half = len(tensors) // 2
        return Sides(self.encoder.fix(*tensors[:half]), self.decoder.fix(*tensors[half:]))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where tokens, [1, tokens, ...], stand in a padded tensor, whose columns may have been cut."""

    rows: Rows
    places: Tensor
    """Of each token in the flattened grid. Tokens whose column was cut off share one more place."""
    grid: tuple[int, int]
    extra: int = 0
    """Tokens after those that have places, which round their number up."""
    is_cut: bool = False
    _cuts: dict[tuple[int, int], Layout] = field(default_factory=dict)

    @staticmethod
    def of_rows(rows: Rows) -> Layout:
        return Layout(rows, rows.places, rows.shape, rows.extra)

    @staticmethod
    def of_lengths(rows: Rows) -> Layout:
        """As little padding as possible: a grid of rows x ``longest``."""
        return Layout(rows, rows.dense, (len(rows.lengths), rows.longest))

    @staticmethod
    def of_filled(rows: Rows) -> Layout:
        """Without columns beyond the bound of a row's length, if all rows begin on the left."""
        layout = Layout.of_rows(rows)
        is_cut = rows.starts_left and rows.bound < rows.shape[1]
        return layout.cut(0, rows.bound) if is_cut else layout

    @property
    def size(self) -> int:
        return self.grid[0] * self.grid[1]

    def cut(self, start: int, stop: int) -> Layout:
        """The same tokens in a grid that has only these columns."""
        if (start, stop) not in self._cuts:
            count, width = self.grid[0], stop - start
            row, column = self.places // self.grid[1], self.places % self.grid[1]
            is_in = (column >= start) & (column < stop) & (self.places < self.size)
            places = torch.where(is_in, row * width + column - start, count * width)
            grid = count, width
            self._cuts[start, stop] = Layout(self.rows, places, grid, self.extra, is_cut=True)
        return self._cuts[start, stop]

    def spread(self, tokens: Tensor, fill: float) -> Tensor:
        """[1, tokens, ...] -> [places, ...], with ``fill`` for padding."""
        tokens = tokens[:, : len(self.places)] if self.extra else tokens
        if not self.is_cut:
            return scatter(tokens, self.places, self.size, fill).squeeze(0)
        return scatter(tokens, self.places, self.size + 1, fill)[0, : self.size]

    def pad(self, tokens: Tensor, fill: float = 0.0) -> Tensor:
        """[1, tokens, ...] -> [*grid, ...], with ``fill`` for padding."""
        return self.spread(tokens, fill).view(*self.grid, *tokens.shape[2:])

    def take(self, values: Tensor) -> Tensor:
        """[places, ...] -> [1, tokens, ...]."""
        if self.is_cut:
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        tokens = gather(values[None], self.places)
        if self.extra:
            zeros = tokens.new_zeros(1, self.extra, *tokens.shape[2:])
            tokens = torch.cat([tokens, zeros], 1)
        return tokens

    def find_tokens(self, places: Tensor) -> Tensor:
        """Which tokens stand at these places; there must be one at each."""
        numbers = torch.arange(len(self.places), device=places.device)
        tokens = numbers.new_zeros(self.size + 1).index_copy_(0, self.places, numbers)
        return tokens[places]

    def covers(self, is_used: Tensor) -> bool:
        """Whether everything marked in [places] is a real token; waits for the device."""
        return int(is_used.sum()) == int(self.select(is_used).sum())

    def select(self, is_used: Tensor) -> Tensor:
        """Whether each token is marked in [places], without those that round their number up."""
        return self.take(is_used)[0, : len(self.places)]


def _is_contiguous(real: Mask) -> bool:
    starts = np.count_nonzero(real[:, 1:] & ~real[:, :-1]) + np.count_nonzero(real[:, 0])
    return bool(starts == np.count_nonzero(real.any(1)))


def round_width(longest: int, rows: int = _MANY_ROWS) -> int:
    """A power of two, at least 64; of few rows, whose longest varies more, every second one."""
    bits = max(6, (longest - 1).bit_length())
    return 1 << (bits + 1 if rows < _MANY_ROWS and bits > 7 and bits % 2 == 0 else bits)


def round_up(tokens: int, *, least: int = 64, sizes: int = 8) -> int:
    """Round up to one of a few: at most ``sizes`` per doubling, all multiples of ``least``."""
    step = max(least, (1 << tokens.bit_length()) // (2 * sizes))
    return -(-tokens // step) * step


def _cut(tokens: int, longest: int) -> list[int]:
    """The lengths of rows that hold this many tokens, at most ``longest`` each."""
    return [min(longest, tokens - start) for start in range(0, tokens, longest)]
