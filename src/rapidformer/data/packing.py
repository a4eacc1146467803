"""Several short examples in one row, so that little of a batch is padding.

`pack_lengths` decides which examples share a row (best fit, longest first); `PackedRows` is the
data set of those rows. Positions restart at 0 with each example, which tells a model where one ends
and the next begins; and the first token of an example has no label, since the token before it
belongs to another example.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.data.data_source import Rows


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which examples share a row of ``capacity`` tokens: longest first, into the fullest."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"an example of {int(sizes.max())} tokens in rows of {capacity}")
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # rows with so much room, the last used at the end
    rooms: list[int] = []  # the keys of by_room, sorted
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(number)
        left = room - size
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(row)
    for members in rows:
        members.sort()
    return sorted(rows, key=lambda members: members[0])


class PackedRows:
    """Rows of several examples; without ``labels``, every token is one. A loader shuffles rows."""

    def __init__(self, examples: Any, rows: Sequence[Sequence[int]]) -> None:
        self._examples = Rows(examples)
        # Flat arrays: a million lists would take more memory, and more still in every worker.
        self._members = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        self._ends = np.cumsum([len(row) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        ends = [(int(self._ends[i - 1]) if i else 0, int(self._ends[i])) for i in indices]
        groups = [self._members[start:end].tolist() for start, end in ends]
        # All at once: a data set on disk answers one long query faster than many short ones.
        fetched = iter(self._examples.get_rows(list(chain.from_iterable(groups))))
        return [_join([next(fetched) for _ in group]) for group in groups]


def _join(examples: list[Any]) -> dict[str, list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for example in examples:
        tokens = list(example["input_ids"])
        ids += tokens
        labels += [IGNORED_LABEL, *example.get("labels", tokens)[1:]]
        positions += range(len(tokens))
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
