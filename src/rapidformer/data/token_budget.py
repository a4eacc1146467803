"""Micro-batches filled to a number of tokens (--tokens-per-micro-batch).

An optimizer step takes the samples it always takes. Only its micro-batches are cut differently:
samples of similar length together, at most this many tokens with padding, and the same number
of micro-batches, of about equal size, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_by_tokens(lengths: Sequence[int], budget: int, num_ranks: int) -> list[list[int]]:
    """The micro-batches of an update, as indices of its samples; a multiple of ``num_ranks``.

    Micro-batch i is for rank i modulo ``num_ranks``; it is empty if there are too few samples. A
    sample longer than the budget gets a micro-batch of its own.
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
