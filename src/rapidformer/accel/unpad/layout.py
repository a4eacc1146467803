"""Where tokens stand in a padded tensor, whose columns may have been cut off at either end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rapidformer.accel.unpad.rows import Rows, gather, scatter


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of tokens, [1, tokens, ...], in a grid of rows and columns."""

    rows: Rows
    places: Tensor
    """Of each token in the flattened grid. Tokens whose column was cut off share one more place."""
    grid: tuple[int, int]
    _cuts: dict[tuple[int, int], Layout] = field(default_factory=dict)

    @staticmethod
    def of_rows(rows: Rows) -> Layout:
        return Layout(rows, rows.places, rows.shape)

    @property
    def size(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def is_whole(self) -> bool:
        return self.places is self.rows.places

    def cut(self, start: int, stop: int) -> Layout:
        """The same tokens in a grid that has only these columns."""
        if (start, stop) not in self._cuts:
            count, width = self.grid[0], stop - start
            row, column = self.places // self.grid[1], self.places % self.grid[1]
            is_in = (column >= start) & (column < stop) & (self.places < self.size)
            places = torch.where(is_in, row * width + column - start, count * width)
            self._cuts[start, stop] = Layout(self.rows, places, (count, width))
        return self._cuts[start, stop]

    def spread(self, tokens: Tensor, fill: float) -> Tensor:
        """[1, tokens, ...] -> [places, ...], with ``fill`` for padding."""
        tokens = tokens[:, : len(self.places)] if self.rows.extra else tokens
        size = self.size if self.is_whole else self.size + 1
        return scatter(tokens, self.places, size, fill)[0, : self.size]

    def take(self, values: Tensor) -> Tensor:
        """[places, ...] -> [1, tokens, ...]."""
        if not self.is_whole:
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        tokens = gather(values[None], self.places)
        extra = self.rows.extra
        if extra:
            tokens = torch.cat([tokens, tokens.new_zeros(1, extra, *tokens.shape[2:])], 1)
        return tokens

    def covers(self, is_used: Tensor) -> bool:
        """Whether everything marked in [places] is a real token; waits for the device."""
        return int(is_used.sum()) == int(self.select(is_used).sum())

    def select(self, is_used: Tensor) -> Tensor:
        """Whether each token is marked in [places], without those that round their number up."""
        return self.take(is_used)[0, : len(self.places)]
