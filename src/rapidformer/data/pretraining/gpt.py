"""GPT samples: ``seq_length + 1`` consecutive tokens, across document boundaries.

There is one token more than the model sees. Inputs are all but the last, labels all but the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rapidformer.data.indexed import IndexedDataset
from rapidformer.errors import DataError


class GPTDataset:
    """Samples of a GPT index, under Megatron's name ``text``.

    They are copied from the mapped file directly into the row, or the rows of a batch.
    """

    def __init__(
        self,
        data: IndexedDataset,
        maps: Mapping[str, np.ndarray],
        *,
        seq_length: int,
        vocab_size: int | None = None,
    ) -> None:
        self._data = data
        self._maps = maps
        self._seq_length = seq_length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._maps["shuffle"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """A batch of samples, in one piece of memory."""
        rows = np.empty((len(indices), self._seq_length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            self._fill(row, index)
        if self._vocab_size is not None and rows.size and rows.max() >= self._vocab_size:
            # Checked here, because on an accelerator the model would crash without a reason.
            raise DataError(
                f"{self._data.prefix} has the token {rows.max()}, but tokenizer and model have "
                f"{self._vocab_size}: it was made with another tokenizer."
            )
        return [{"text": row} for row in rows]

    def _fill(self, row: np.ndarray, index: int) -> None:
        shuffle, samples = self._maps["shuffle"], self._maps["samples"]
        if not -shuffle.size <= index < shuffle.size:
            raise IndexError(f"sample {index} of {shuffle.size}")
        number = shuffle.item(index)
        (place, offset), (last_place, last_offset) = samples[number : number + 2].tolist()
        documents, get = self._maps["documents"], self._data.get
        if place == last_place:
            row[:] = get(documents.item(place), offset, row.size)
            return
        filled = 0
        for document in documents[place:last_place].tolist():
            piece = get(document, offset)
            row[filled : filled + piece.size] = piece
            filled += piece.size
            offset = 0
        row[filled:] = get(documents.item(last_place), 0, last_offset + 1)
