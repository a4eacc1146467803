"""Which sentences form a BERT or T5 sample: rows of (first sentence, end, target length).

A document's sentences are collected until they reach a target length, which is the full length or
occasionally a shorter one; the random numbers are those of Megatron's C++. How many numbers a
document draws depends on how it is cut, so documents cannot be cut independently. But most targets
are the full length: all documents are cut for it at once, and only those that hit a short target
are cut again, one by one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rapidformer.errors import DataError

LONG_SENTENCE = 512
"""A document of several sentences with one longer than this is skipped."""
_BLOCK = 1 << 18
_NEVER = (2**63 - 1, 0)


class _Cuts(NamedTuple):
    """Every usable document cut for the full length; sentences count from the split's first."""

    row_counts: np.ndarray
    """Rows of each document."""
    lasts: np.ndarray
    """Where each document's sentences end."""
    documents: np.ndarray
    """The document of each row."""
    ranks: np.ndarray
    """The index of each row within its document."""
    starts: np.ndarray
    ends: np.ndarray


def build_sentence_map(
    doc_idx: np.ndarray,
    sizes: np.ndarray,
    *,
    num_samples: int | None,
    max_length: int,
    short_seq_prob: float,
    min_sentences: int,
    seed: int,
) -> np.ndarray:
    """The rows, shuffled; whole epochs until there are ``num_samples`` (None: one epoch)."""
    if max_length < 2:
        raise DataError(
            f"a sample can hold {max_length} tokens of text besides the special ones, at least 2 "
            "are needed: take a longer --seq-length."
        )
    first = int(doc_idx[0])
    lengths = np.array(sizes[first : int(doc_idx[-1])], dtype=np.int32)
    running = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=running[1:])
    firsts, lasts = _choose_documents(np.asarray(doc_idx) - first, lengths, min_sentences)
    cuts = _cut_for_full_length(running, firsts, lasts, max_length, min_sentences)
    targets = _draw_short_targets(short_seq_prob, max_length, seed)
    cutter = _EpochCutter(running, cuts, targets, max_length, min_sentences)
    epochs = [cutter.cut()]
    num_rows = len(epochs[0])
    while num_samples is not None and num_rows < num_samples:
        epochs.append(cutter.cut())
        num_rows += len(epochs[-1])
    rows = np.concatenate(epochs)
    rows[:, :2] += first
    dtype = np.uint32 if sizes.size <= np.iinfo(np.uint32).max else np.uint64
    return rows.astype(dtype)[_shuffle(len(rows), seed + 1)]


def _choose_documents(
    doc_idx: np.ndarray, lengths: np.ndarray, min_sentences: int
) -> tuple[np.ndarray, np.ndarray]:
    firsts, lasts = doc_idx[:-1], doc_idx[1:]
    counts = lasts - firsts
    is_enough = counts >= min_sentences
    has_long = np.zeros(counts.size, dtype=bool)
    long_ones = np.nonzero(lengths > LONG_SENTENCE)[0]
    has_long[np.searchsorted(doc_idx, long_ones, side="right") - 1] = True
    has_long &= counts > 1
    chosen = is_enough & ~has_long
    if chosen.any():
        return firsts[chosen], lasts[chosen]
    too_few = int((~is_enough).sum())
    way_out = "take a larger fraction in --split"
    if too_few == counts.size and min_sentences > 1:
        way_out = "train without the sentence-order head (binary_head=False)"
    raise DataError(
        f"none of the {counts.size} documents can be used: {too_few} have fewer than "
        f"{min_sentences} sentences and {int(has_long.sum())} have a sentence of more than "
        f"{LONG_SENTENCE} tokens. Make the data with --split-sentences, or {way_out}."
    )


def _cut_for_full_length(
    running: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, length: int, min_sentences: int
) -> _Cuts:
    """Cut all documents side by side: row n of each in iteration n."""
    row_counts = np.zeros(firsts.size, dtype=np.int64)
    turns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    open_ones, starts = np.arange(firsts.size), firsts
    while open_ones.size:
        stops = lasts[open_ones]
        ends = np.searchsorted(running, running[starts] + length, side="left")
        ends = np.maximum(ends, starts + min_sentences)
        # A single sentence is never left over: it would have nothing to be paired with.
        ends = np.where(stops - ends > 1, ends, stops)
        turns.append((open_ones, starts, ends))
        row_counts[open_ones] += 1
        is_open = ends < stops
        open_ones, starts = open_ones[is_open], ends[is_open]
    offsets = np.cumsum(row_counts) - row_counts
    total = int(row_counts.sum())
    documents = np.repeat(np.arange(firsts.size), row_counts)
    all_starts, all_ends = np.empty((2, total), dtype=np.int64)
    for turn, (which, starts, ends) in enumerate(turns):
        all_starts[offsets[which] + turn] = starts
        all_ends[offsets[which] + turn] = ends
    ranks = np.arange(total) - offsets[documents]
    return _Cuts(row_counts, lasts, documents, ranks, all_starts, all_ends)


def _draw_short_targets(
    short_seq_prob: float, max_length: int, seed: int
) -> Iterator[tuple[int, int]]:
    """(draw index, target) of each draw that gives a short target."""
    if short_seq_prob <= 0:
        return
    ratio = math.floor(1.0 / short_seq_prob + 0.5)  # C++ rounds halves up, Python to even
    for block, numbers in enumerate(draw_uint32(seed, _BLOCK)):
        hits = np.nonzero(numbers % ratio == 0)[0]
        targets = 2 + numbers[hits].astype(np.int64) % (max_length - 1)
        yield from zip((hits + block * _BLOCK).tolist(), targets.tolist(), strict=True)


class _EpochCutter:
    """Cuts all documents once per call, and tracks the position in the random numbers."""

    def __init__(
        self,
        running: np.ndarray,
        cuts: _Cuts,
        targets: Iterator[tuple[int, int]],
        max_length: int,
        min_sentences: int,
    ) -> None:
        self._running = running.data  # lookups in a memoryview give Python integers
        self._cuts = cuts
        self._targets = targets
        self._max_length = max_length
        self._min_sentences = min_sentences
        # A document draws once at its start and once after each of its rows.
        draws = cuts.row_counts + 1
        self._first_draws = np.cumsum(draws) - draws
        self._first_rows = np.cumsum(cuts.row_counts) - cuts.row_counts
        self._draws_in_epoch = int(draws.sum())
        self._draws_before = 0
        self._next = next(targets, _NEVER)

    def cut(self) -> np.ndarray:
        """The rows of one epoch, in document order."""
        changed, kept, added, rows = self._recut_short_ones()
        keep_counts = self._cuts.row_counts.copy()
        keep_counts[changed] = kept
        counts = keep_counts.copy()
        counts[changed] += np.array(added, dtype=np.int64)
        offsets = np.cumsum(counts) - counts
        documents, ranks = self._cuts.documents, self._cuts.ranks
        is_kept = ranks < keep_counts[documents]
        places = (offsets[documents] + ranks)[is_kept]
        result = np.empty((int(counts.sum()), 3), dtype=np.int64)
        result[places, 0] = self._cuts.starts[is_kept]
        result[places, 1] = self._cuts.ends[is_kept]
        result[places, 2] = self._max_length
        if rows:
            is_recut = np.ones(len(result), dtype=bool)
            is_recut[places] = False
            result[is_recut] = np.frombuffer(rows, dtype=np.int64).reshape(-1, 3)
        return result

    def _recut_short_ones(self) -> tuple[list[int], list[int], list[int], array[int]]:
        """The documents that hit a short target, the rows each keeps, and all their new rows."""
        changed: list[int] = []
        kept: list[int] = []
        added: list[int] = []
        rows: array[int] = array("q")
        first_draws, first_rows = self._first_draws.data, self._first_rows.data
        row_counts, starts = self._cuts.row_counts.data, self._cuts.starts.data
        lasts = self._cuts.lasts.tolist() if self._next != _NEVER else []
        before, draws_in_epoch, document = self._draws_before, self._draws_in_epoch, 0
        while (place := self._next[0] - before) < draws_in_epoch:
            document = bisect_right(first_draws, place, lo=document) - 1
            rank = place - first_draws[document]
            if rank == row_counts[document]:
                # The draw after a document's last row does not matter.
                self._next = next(self._targets)
                continue
            start = starts[first_rows[document] + rank]
            count = self._recut(start, lasts[document], self._next[0], rows)
            changed.append(document)
            kept.append(rank)
            added.append(count)
            # From here on, all draws come that much later than in the full-length cut.
            before += rank + count - row_counts[document]
            document += 1
        self._draws_before = before + draws_in_epoch
        return changed, kept, added, rows

    def _recut(self, start: int, last: int, draw: int, rows: array[int]) -> int:
        """Cut the rest of a document, starting at that draw's row; returns its number of rows."""
        running, min_sentences = self._running, self._min_sentences
        short_draw, short_target = self._next
        count = 0
        while start < last:
            target = self._max_length
            if draw == short_draw:
                target = short_target
                short_draw, short_target = next(self._targets)
            lowest = start + min_sentences
            end = bisect_left(running, running[start] + target, lo=lowest, hi=max(lowest, last))
            if last - end <= 1:
                end = last
            rows.extend((start, end, target))
            start = end
            draw += 1
            count += 1
        if draw == short_draw:  # the draw after the last row
            short_draw, short_target = next(self._targets)
        self._next = short_draw, short_target
        return count


def _shuffle(count: int, seed: int) -> np.ndarray:
    """The order obtained by swapping from the back with ``std::mt19937_64(seed)``."""
    order = np.arange(count)
    first_use = np.empty(count, dtype=np.int64)
    place = count - 1
    for numbers in draw_uint64(seed, _BLOCK):
        if place < 1:
            break
        places = np.arange(place, max(place - numbers.size, 0), -1)
        others = (numbers[: places.size] % (places + 1).astype(np.uint64)).astype(np.int64)
        done = 0
        while done < places.size:
            # About this many random places in a row are distinct.
            stop = done + int(math.sqrt(places[done])) + 1
            stop = done + _count_independent(places[done:stop], others[done:stop], first_use)
            here, there = places[done:stop], others[done:stop]
            order[here], order[there] = order[there], order[here]
            done = stop
        place -= places.size
    return order


def _count_independent(places: np.ndarray, others: np.ndarray, first_use: np.ndarray) -> int:
    """How many of these swaps, from the first, touch no place twice and can be done in one step."""
    numbers = np.arange(places.size)
    first_use[others[::-1]] = numbers[::-1]
    is_repeated = first_use[others] != numbers
    # A place that is swapped into now and is itself due later.
    is_ahead = (others >= places[-1]) & (others < places)
    if not is_repeated.any() and not is_ahead.any():
        return places.size
    repeated = int(is_repeated.argmax()) if is_repeated.any() else places.size
    ahead = int(places[0] - others[is_ahead].max()) if is_ahead.any() else places.size
    return min(repeated, ahead)


# --- random numbers ------------------------------------------------------------------------------
# C++'s two Mersenne Twisters, drawn in blocks. ``std::mt19937(seed)`` equals numpy's
# ``RandomState(seed)``; numpy lacks ``std::mt19937_64``. A block of 312 of its numbers is computed
# from the previous one in two halves, since the second needs the new numbers of the first.

_SIZE = 312
_MIDDLE = 156
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x7FFFFFFF)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_ONE = np.uint64(1)


def draw_uint32(seed: int, block: int) -> Iterator[np.ndarray]:
    """Blocks of ``std::mt19937(seed)``, endlessly."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield random.randint(0, 2**32, size=block, dtype=np.uint32)


def draw_uint64(seed: int, block: int) -> Iterator[np.ndarray]:
    """Blocks of ``std::mt19937_64(seed)``, endlessly."""
    words = [seed % 2**64]
    for i in range(1, _SIZE):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    state = np.array(words, dtype=np.uint64)
    states_per_block = -(-block // _SIZE)
    while True:
        raw = np.empty((states_per_block, _SIZE), dtype=np.uint64)
        for row in raw:
            _advance(state)
            row[:] = state
        tempered = raw.reshape(-1)
        tempered ^= (tempered >> np.uint64(29)) & np.uint64(0x5555555555555555)
        tempered ^= (tempered << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        tempered ^= (tempered << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        tempered ^= tempered >> np.uint64(43)
        yield tempered


def _advance(state: np.ndarray) -> None:
    state[:_MIDDLE] = state[_MIDDLE:] ^ _twist(state[:_MIDDLE], state[1 : _MIDDLE + 1])
    following = np.append(state[_MIDDLE + 1 :], state[0])
    state[_MIDDLE:] = state[:_MIDDLE] ^ _twist(state[_MIDDLE:], following)


def _twist(words: np.ndarray, following: np.ndarray) -> np.ndarray:
    mixed = (words & _UPPER) | (following & _LOWER)
    return (mixed >> _ONE) ^ ((mixed & _ONE) * _MATRIX)
