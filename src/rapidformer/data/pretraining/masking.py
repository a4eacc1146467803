"""Which tokens of a sample are masked: whole words in short runs, with Megatron's random draws.

A run length is drawn for every word in turn, even if the word is already masked or does not fit,
and each draw advances the random state. Skipping a word before its draw would change every later
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rapidformer.errors import DataError

MAX_WORDS_BERT = 3
MAX_WORDS_T5 = 10
_GEOMETRIC = 0.2


class Words(NamedTuple):
    """Word ``w`` consists of the tokens at ``positions[bounds[w] : bounds[w + 1]]``."""

    positions: np.ndarray
    bounds: list[int]


class Masked(NamedTuple):
    """Tokens after masking, and the original tokens at the places to predict."""

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def _compute_word_thresholds() -> tuple[float, float]:
    """Thresholds of numpy's ``choice`` among 1, 2 and 3 words with odds 1, 1/2 and 1/3."""
    odds = 1.0 / np.arange(1, MAX_WORDS_BERT + 1)
    odds /= odds.sum()
    odds = odds / odds.sum()
    running = odds.cumsum()
    running /= running[-1]
    return float(running[0]), float(running[1])


_WORD_THRESHOLDS = _compute_word_thresholds()


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know about a tokenizer; small, because it is sent to workers."""

    name: str
    word_starts: np.ndarray
    ids: Sequence[int]
    """The ids that random replacements are drawn from, in Megatron's order."""

    @classmethod
    def of(cls, tokenizer: Any, limit: int | None = None) -> Vocabulary:
        """``limit``: ids at or above it are never used as replacements."""
        ids = sorted(i for i in tokenizer.inv_vocab if limit is None or i < limit)
        is_complete = ids == list(range(len(ids)))
        word_starts = np.asarray(tokenizer.word_starts, dtype=bool)
        return cls(tokenizer.name, word_starts, range(len(ids)) if is_complete else ids)

    def find_words(self, tokens: np.ndarray, special: Sequence[int]) -> Words:
        """The words between special tokens; a piece joins the word before it, even across one."""
        is_text = np.ones(tokens.size, dtype=bool)
        for token in special:
            is_text &= tokens != token
        positions = np.nonzero(is_text)[0]
        try:
            is_start = self.word_starts[tokens[positions]]
        except IndexError:
            raise DataError(
                f"the data has the token {int(tokens.max())}, but the tokenizer {self.name} has "
                f"{self.word_starts.size}: it was made with another tokenizer."
            ) from None
        is_start[:1] = True
        return Words(positions, [*np.nonzero(is_start)[0].tolist(), positions.size])


def count_to_predict(num_tokens: int, target_length: int, mask_prob: float) -> float:
    """The maximum number of masked tokens. It stays a fraction: it is only compared with."""
    return min(mask_prob * target_length, max(1, round(num_tokens * mask_prob)))


def choose_spans(
    bounds: Sequence[int], budget: float, order: Sequence[int], draw_words: Callable[[], int]
) -> Iterator[tuple[int, int]]:
    """Runs of words to mask, as (first, end); lazily, as BERT draws between them."""
    num_words = len(bounds) - 1
    is_hidden = bytearray(num_words)
    hidden_tokens = 0
    for first in order:
        if hidden_tokens + 1 > budget:
            # No word fits any more, and nothing is drawn after this: the rest does not matter.
            return
        end = min(first + draw_words(), num_words)
        start_token = bounds[first]
        room = budget - hidden_tokens
        while end > first + 1 and bounds[end] - start_token > room:
            end -= 1
        length = bounds[end] - start_token
        if length > room or any(is_hidden[first:end]):
            continue
        is_hidden[first:end] = b"\x01" * (end - first)
        hidden_tokens += length
        yield first, end


def mask_tokens(
    tokens: np.ndarray,
    vocabulary: Vocabulary,
    *,
    special: Sequence[int],
    mask_id: int,
    target_length: int,
    mask_prob: float,
    random: np.random.RandomState,
) -> Masked:
    """BERT's masking: 80 % of the chosen tokens become the mask, 10 % stay, 10 % are random."""
    if mask_prob == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return Masked(tokens, nothing, nothing)
    words = vocabulary.find_words(tokens, special)
    order = _shuffle_words(words, random)
    budget = count_to_predict(tokens.size, target_length, mask_prob)
    draw = random.random_sample
    below_one, below_two = _WORD_THRESHOLDS

    def draw_words() -> int:
        number = draw()
        return 1 if number < below_one else 2 if number < below_two else 3

    masked = tokens.copy()
    chosen: list[int] = []
    for first, end in choose_spans(words.bounds, budget, order, draw_words):
        span = words.positions[words.bounds[first] : words.bounds[end]].tolist()
        chosen += span
        for position in span:
            if draw() < 0.8:
                masked[position] = mask_id
            elif draw() >= 0.5:
                masked[position] = vocabulary.ids[random.randint(0, len(vocabulary.ids))]
    positions = np.array(sorted(chosen), dtype=np.int64)
    return Masked(masked, positions, tokens[positions])


def draw_t5_spans(
    tokens: np.ndarray,
    vocabulary: Vocabulary,
    *,
    special: Sequence[int],
    target_length: int,
    mask_prob: float,
    random: np.random.RandomState,
) -> list[np.ndarray]:
    """T5's spans, as the positions of their tokens, in text order."""
    if mask_prob == 0:
        return []
    words = vocabulary.find_words(tokens, special)
    order = _shuffle_words(words, random)
    budget = count_to_predict(tokens.size, target_length, mask_prob)
    # Nothing else is drawn in between, so all lengths can be drawn at once.
    lengths = np.minimum(random.geometric(_GEOMETRIC, size=len(order)), MAX_WORDS_T5)
    spans = sorted(choose_spans(words.bounds, budget, order, iter(lengths.tolist()).__next__))
    bounds = words.bounds
    return [words.positions[bounds[first] : bounds[end]] for first, end in spans]


def _shuffle_words(words: Words, random: np.random.RandomState) -> list[int]:
    order = np.arange(len(words.bounds) - 1)
    random.shuffle(order)
    return order.tolist()
