"""Batches of similar length, which pad least: --group-by-length and --tokens-per-micro-batch.

Grouping is transformers': the samples are shuffled, cut into groups of many batches, and each group
is sorted by length, so that the order stays random between groups. The longest sample of all comes
first: what does not fit into memory fails at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapidformer.data.data_source import find_length
from rapidformer.data.mixture import FromSet
from rapidformer.errors import DataError


def measure_lengths(dataset: Any, column: str, flag: str = "--group-by-length") -> list[int]:
    """The length of every sample: a column of the data, or the number of its tokens."""
    if find_length(dataset) is None:
        raise DataError(f"{flag} needs to know all lengths: a stream has no length.")
    names = getattr(dataset, "column_names", None) or []
    if column in names:
        return [_to_length(value, column) for value in dataset[column]]
    if "input_ids" in names:
        return [len(ids) for ids in dataset["input_ids"]]
    try:
        return [_measure(dataset[index], column) for index in range(len(dataset))]
    except (TypeError, KeyError, IndexError):
        raise DataError(
            f"{flag}: the samples have neither a column {column!r} nor input_ids. Name the column "
            "of their lengths, or that of their tokens, with --length-column."
        ) from None


def measure_sample(sample: Any) -> int:
    """The tokens of a stream's sample."""
    if isinstance(sample, FromSet):
        sample = sample.sample
    try:
        return len(sample["input_ids"])
    except (TypeError, KeyError, IndexError):
        raise DataError(
            "--tokens-per-micro-batch: the samples of the stream have no input_ids to count: "
            "use --micro-batch-size."
        ) from None


def _measure(sample: Any, column: str) -> int:
    if isinstance(sample, Mapping) and column in sample:
        return _to_length(sample[column], column)
    return len(sample["input_ids"])


def _to_length(value: Any, column: str) -> int:
    """A length, or that of tokens."""
    is_text = isinstance(value, str)  # characters are not tokens
    is_sequence = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    try:
        return len(value) if is_sequence and not is_text else int(value)
    except (TypeError, ValueError):
        raise DataError(
            f"--length-column {column}: {str(value)[:40]!r} is neither a length nor a list of "
            "tokens. Name another column."
        ) from None


@dataclass
class GroupedOrder:
    """An order by groups of similar length, by torch's numbers and the first batch size alone."""

    lengths: Sequence[int]
    batch_size: int

    def __call__(self) -> list[int]:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        return get_length_grouped_indices(self.lengths, self.batch_size)


def sort_in_groups(
    sizes: Sequence[int], lengths: Sequence[int] | None, start: int = 0
) -> list[int]:
    """Samples from ``start`` on, in groups of these sizes, each longest first if known."""
    order: list[int] = []
    for size in sizes:
        group = range(start + len(order), start + len(order) + size)
        order += group if lengths is None else sorted(group, key=lambda i: -lengths[i])
    return order


def split_by_tokens(lengths: Sequence[int], budget: int, num_ranks: int) -> list[list[int]]:
    """The micro-batches of an update, as indices of its samples; a multiple of ``num_ranks``.

    For --tokens-per-micro-batch: an update takes the samples it always takes, but cuts them into
    micro-batches of similar length, of at most ``budget`` tokens with padding, as many and about as
    large on every rank. Micro-batch i is for rank i modulo ``num_ranks``; it is empty if there are
    too few samples. A sample longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    sizes = [max(lengths[index], 1) for index in order]
    budget = max(budget, sizes[0])
    count = -(-len(_cut(sizes, budget)) // num_ranks) * num_ranks
    # The smallest limit that needs no more micro-batches than the budget: it balances them.
    low, high = sizes[0], budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(sizes, middle)) <= count else (middle + 1, high)
    pieces = _cut(sizes, high)

    def measure(piece: range) -> int:
        return len(piece) * sizes[piece.start] if piece else 0

    while len(pieces) < count:
        # Halve the largest, so that every rank has work; a single sample leaves one half empty.
        largest = max(pieces, key=lambda piece: (len(piece) > 1, measure(piece)))
        pieces.remove(largest)
        pieces += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    # Ranks work on neighbours at the same time: these should be of equal size.
    pieces.sort(key=measure, reverse=True)
    return [sorted(order[place] for place in piece) for piece in pieces]


def _cut(sizes: Sequence[int], limit: int) -> list[range]:
    """Neighbours of a descending list, as many together as their padded size allows."""
    starts = [0]
    for place in range(1, len(sizes)):
        if (place - starts[-1] + 1) * sizes[starts[-1]] > limit:
            starts.append(place)
    return [range(*ends) for ends in zip(starts, [*starts[1:], len(sizes)], strict=True)]
