"""GPT samples, and the three index maps that define them, with Megatron's order of random draws.

All sequences of a split, in a shuffled order that repeats as needed, form one long row of tokens;
sample ``k`` is the ``seq_length + 1`` tokens starting at token ``k * seq_length``, so neighbours
share one token: inputs are all but the last, labels all but the first. No walk is needed to find a
sample: the cumulative lengths are known, so one search locates a million samples at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rapidformer.data.indexed import IndexedDataset
from rapidformer.errors import DataError

if TYPE_CHECKING:
    import torch

# The last epoch is shuffled separately if less than this fraction of it is needed; otherwise
# samples of a partly used epoch would be spread over the whole run.
_WHOLE_EPOCH_FRACTION = 0.80
_CHUNK = 1 << 20


class _Epochs(NamedTuple):
    repeats: int
    """Number of epochs."""
    total: int
    """Samples in all epochs."""
    shuffled_together: int
    """Samples before the last epoch, if that is shuffled separately; otherwise all."""

    @property
    def is_last_apart(self) -> bool:
        return self.shuffled_together != self.total


def build_gpt_index(
    sizes: np.ndarray, start: int, stop: int, *, num_samples: int | None, seq_length: int, seed: int
) -> dict[str, np.ndarray]:
    """The maps for sequences ``start`` to ``stop``; ``num_samples`` None uses each token once.

    The order of ``documents``; where ``samples`` start, as pairs of an index in that order and a
    token offset; and the order of samples.
    """
    # The sizes are unaligned in the index file, and are looked up in random order below.
    sizes = np.array(sizes[start:stop], dtype=np.int32)
    tokens = int(sizes.sum(dtype=np.int64))
    if tokens <= seq_length:
        raise DataError(
            f"the {stop - start} sequences hold {tokens} tokens, fewer than the {seq_length + 1} "
            f"of one sample (--seq-length {seq_length} and the token that follows): take more "
            "data, a larger share in --split, or a shorter --seq-length."
        )
    epochs = _count_epochs(tokens, seq_length, num_samples)
    random = np.random.RandomState(seed)
    is_huge = max(epochs.repeats * sizes.size, stop) >= 2**31
    order = _order_documents(sizes.size, epochs, np.int64 if is_huge else np.int32, random)
    samples = _place_samples(sizes, order, seq_length, epochs.total)
    is_huge = epochs.total >= np.iinfo(np.uint32).max - 1
    shuffle = np.arange(epochs.total, dtype=np.int64 if is_huge else np.uint32)
    random.shuffle(shuffle[: epochs.shuffled_together])
    if epochs.is_last_apart:
        random.shuffle(shuffle[epochs.shuffled_together :])
    order += start  # in place: only here do they become sequence numbers of the file
    return {"documents": order, "samples": samples, "shuffle": shuffle}


def _count_epochs(tokens: int, seq_length: int, num_samples: int | None) -> _Epochs:
    count = 1
    if num_samples is not None:
        # The smallest count with (count * tokens - 1) // seq_length >= num_samples.
        count = max(1, -(-(num_samples * seq_length + 1) // tokens))
    total = (count * tokens - 1) // seq_length
    if count == 1 or num_samples is None:
        return _Epochs(count, total, total)
    before = ((count - 1) * tokens - 1) // seq_length
    in_one = (tokens - 1) // seq_length
    is_apart = num_samples - before < int(_WHOLE_EPOCH_FRACTION * in_one)
    return _Epochs(count, total, before if is_apart else total)


def _order_documents(
    count: int, epochs: _Epochs, dtype: type[np.signedinteger], random: np.random.RandomState
) -> np.ndarray:
    entries = count * epochs.repeats
    order = np.empty(entries, dtype=dtype)
    order.reshape(epochs.repeats, count)[:] = np.arange(count, dtype=order.dtype)
    together = entries - count if epochs.is_last_apart else entries
    random.shuffle(order[:together])
    if together < entries:
        random.shuffle(order[together:])
    return order


def _place_samples(sizes: np.ndarray, order: np.ndarray, seq_length: int, total: int) -> np.ndarray:
    samples = np.empty((total + 1, 2), dtype=order.dtype)
    # Megatron's walk starts at the first sequence of the order even if it is empty; every other
    # sample starts at its first token, which no empty sequence has.
    samples[0] = 0
    row, tokens_before = 1, 0
    for begin in range(0, order.size, _CHUNK):
        lengths = sizes[order[begin : begin + _CHUNK]]
        ends = np.cumsum(lengths, dtype=np.int64)
        ends += tokens_before
        last = min((int(ends[-1]) - 1) // seq_length, total)
        if last >= row:
            starts = np.arange(row, last + 1, dtype=np.int64)
            starts *= seq_length
            places = np.searchsorted(ends, starts, side="right")
            samples[row : last + 1, 0] = places + begin
            samples[row : last + 1, 1] = starts - (ends[places] - lengths[places])
            row = last + 1
        tokens_before = int(ends[-1])
    return samples


@dataclass(frozen=True, eq=False, repr=False)
class GPTDataset:
    """Samples under Megatron's name ``text``, copied from the mapped file into the rows."""

    data: IndexedDataset
    maps: Mapping[str, np.ndarray]
    seq_length: int
    vocab_size: int | None = None

    def __len__(self) -> int:
        return len(self.maps["shuffle"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """A batch of samples, in one piece of memory."""
        rows = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            self._fill(row, index)
        if self.vocab_size is not None and rows.size and rows.max() >= self.vocab_size:
            # Checked here, because on an accelerator the model would crash without a reason.
            raise DataError(
                f"{self.data.prefix} has the token {rows.max()}, but tokenizer and model have "
                f"{self.vocab_size}: it was made with another tokenizer."
            )
        return [{"text": row} for row in rows]

    def _fill(self, row: np.ndarray, index: int) -> None:
        shuffle, samples = self.maps["shuffle"], self.maps["samples"]
        if not -shuffle.size <= index < shuffle.size:
            raise IndexError(f"sample {index} of {shuffle.size}")
        number = shuffle.item(index)
        (place, offset), (last_place, last_offset) = samples[number : number + 2].tolist()
        documents, get = self.maps["documents"], self.data.get
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


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention mask (True is hidden), loss mask and positions of tokens ``[batch, sequence]``.

    The attention mask is ``[1, 1, sequence, sequence]``, one for all rows, unless it is reset at
    document boundaries. An end-of-document token belongs to the document it ends. A plain causal
    mask has the attribute ``is_plain_causal``: a model that knows it, like GPTModel, can take the
    fast path without looking at the mask.
    """
    import torch

    rows, length = data.shape
    is_end = data == eod_token
    place = torch.arange(length, device=data.device)
    hidden = (place > place[:, None])[None, None]
    if reset_attention_mask:
        # The document index of each token: the number of document ends before it.
        document = is_end.cumsum(dim=1) - is_end.long()
        hidden = hidden | (document[:, None, None, :] != document[:, None, :, None])
    else:
        hidden.is_plain_causal = True  # type: ignore[attr-defined]
    position_ids = place.expand(rows, length).contiguous()
    if reset_position_ids:
        starts = torch.zeros_like(position_ids)
        starts[:, 1:] = torch.where(is_end[:, :-1], place[1:], 0)
        position_ids = position_ids - starts.cummax(dim=1).values
    loss_mask = torch.ones(data.shape, dtype=torch.float, device=data.device)
    if eod_mask_loss:
        loss_mask[is_end] = 0.0
    return hidden, loss_mask, position_ids
