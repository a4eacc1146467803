"""Plain, slow ways to the same index maps and samples: one thing after the other, in lists.

They follow the words of the contract, not our code: walks instead of searches, loops instead of
arrays, one random draw at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

MASK_64 = 2**64 - 1


def split_slowly(shares: list[float], size: int) -> list[int]:
    total = sum(shares)
    bounds = [0]
    for share in [*shares, 0.0, 0.0][:3]:
        bounds.append(bounds[-1] + round(share / total * size))
    difference = bounds[-1] - size
    return [bounds[0]] + [bound - difference for bound in bounds[1:]]


def index_gpt_slowly(
    sizes: list[int], num_samples: int, seq_length: int, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    tokens = sum(sizes)
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // seq_length
    apart = epochs > 1 and num_samples - before < int(0.80 * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    blocks = [epochs - 1, 1] if apart else [epochs]
    documents: list[int] = []
    for block in blocks:
        part = list(range(len(sizes))) * block
        random.shuffle(part)
        documents += part
    total = (epochs * tokens - 1) // seq_length
    samples = [(0, 0)]
    place, offset = 0, 0
    while len(samples) <= total:
        needed = seq_length + 1
        while sizes[documents[place]] - offset < needed:
            needed -= sizes[documents[place]] - offset
            place, offset = place + 1, 0
        offset += needed - 1  # the last token of one sample is the first of the next
        samples.append((place, offset))
    order: list[int] = []
    for start, stop in [(0, before), (before, total)] if apart else [(0, total)]:
        part = list(range(start, stop))
        random.shuffle(part)
        order += part
    return documents, samples, order


class SlowTwister64:
    """std::mt19937_64, number by number, from its definition."""

    def __init__(self, seed: int) -> None:
        self.state = [seed & MASK_64]
        for i in range(1, 312):
            last = self.state[-1]
            self.state.append((6364136223846793005 * (last ^ (last >> 62)) + i) & MASK_64)
        self.position = 0

    def draw(self) -> int:
        i = self.position % 312
        self.position += 1
        state = self.state
        mixed = (state[i] & 0xFFFFFFFF80000000) | (state[(i + 1) % 312] & 0x7FFFFFFF)
        state[i] = state[(i + 156) % 312] ^ (mixed >> 1) ^ (0xB5026F5AA96619E9 * (mixed & 1))
        word = state[i]
        word ^= (word >> 29) & 0x5555555555555555
        word ^= (word << 17) & 0x71D67FFFEDA60000
        word ^= (word << 37) & 0xFFF7EEE000000000
        return word ^ (word >> 43)


def map_sentences_slowly(
    doc_idx: list[int],
    sizes: list[int],
    max_num_samples: int,
    max_length: int,
    short_seq_prob: float,
    min_sentences: int,
    seed: int,
) -> list[tuple[int, int, int]]:
    random = np.random.RandomState(seed)

    def draw_target() -> int:
        if short_seq_prob == 0:
            return max_length
        number = int(random.randint(0, 2**32, dtype=np.uint32))
        if number % int(1 / short_seq_prob + 0.5) == 0:
            return 2 + number % (max_length - 1)
        return max_length

    rows: list[tuple[int, int, int]] = []
    while len(rows) < max_num_samples:
        for first, last in pairwise(doc_idx):
            is_long = last - first > 1 and max(sizes[first:last]) > 512
            if last - first < min_sentences or is_long:
                continue
            target, start, length = draw_target(), first, 0
            for sentence in range(first, last):
                length += sizes[sentence]
                left, count = last - sentence - 1, sentence + 1 - start
                if left == 0 or (length >= target and left > 1 and count >= min_sentences):
                    rows.append((start, sentence + 1, target))
                    target, start, length = draw_target(), sentence + 1, 0
    twister = SlowTwister64(seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = twister.draw() % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def blend_slowly(weights: list[float], size: int) -> list[tuple[int, int]]:
    taken = [0] * len(weights)
    steps = []
    for step in range(size):
        best, best_error = 0, -float("inf")
        for number, weight in enumerate(weights):
            error = weight * max(float(step), 1.0) - float(taken[number])
            if error > best_error:
                best, best_error = number, error
        steps.append((best, taken[best]))
        taken[best] += 1
    return steps


# --- samples -------------------------------------------------------------------------------------


def pick_spans_slowly(
    words: list[list[int]], budget: float, random: np.random.RandomState, *, for_t5: bool
) -> Any:
    """Yields the positions of each run of words that is hidden."""
    order = list(range(len(words)))
    random.shuffle(order)
    odds = np.array([1.0, 1 / 2, 1 / 3])
    hidden: set[int] = set()
    for first in order:
        if len(hidden) >= budget:
            return
        if for_t5:
            number = min(int(random.geometric(0.2)), 10)
        else:
            number = int(random.choice([1, 2, 3], p=odds / odds.sum()))
        for tried in range(number, 0, -1):
            span = [position for word in words[first : first + tried] for position in word]
            if len(hidden) + len(span) <= budget:
                break
        else:
            continue
        if hidden.isdisjoint(span):
            hidden.update(span)
            yield span


def find_words_slowly(tokens: list[int], tokenizer: Any, special: list[int]) -> list[list[int]]:
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in special:
            continue
        if words and tokenizer.inv_vocab[token].startswith("##"):
            words[-1].append(position)
        else:
            words.append([position])
    return words


def make_bert_slowly(
    sentences: list[list[int]],
    target: int,
    tokenizer: Any,
    *,
    length: int,
    mask_prob: float,
    seed: int,
    binary_head: bool,
) -> dict[str, Any]:
    random = np.random.RandomState(seed)
    first: list[int] = []
    second: list[int] = []
    is_random = False
    if binary_head:
        border = random.randint(1, len(sentences)) if len(sentences) > 2 else 1
        for number, sentence in enumerate(sentences):
            (first if number < border else second).extend(sentence)
        if random.random() < 0.5:
            is_random = True
            first, second = second, first
    else:
        first = [token for sentence in sentences for token in sentence]
    while len(first) + len(second) > target:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if random.random() < 0.5 else -1)
    cls, sep = tokenizer.cls, tokenizer.sep
    tokens = [cls, *first, sep] + ([*second, sep] if second else [])
    types = [0] * (len(first) + 2) + ([1] * (len(second) + 1) if second else [])
    text, labels = list(tokens), [-100] * length
    if mask_prob:
        budget = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
        words = find_words_slowly(tokens, tokenizer, [cls, sep])
        for span in pick_spans_slowly(words, budget, random, for_t5=False):
            for position in span:
                labels[position] = tokens[position]
                if random.random() < 0.8:
                    text[position] = tokenizer.mask
                elif random.random() >= 0.5:
                    text[position] = random.randint(0, tokenizer.own_vocab_size)
    padding = [tokenizer.pad] * (length - len(tokens))
    sample = {
        "input_ids": text + padding,
        "attention_mask": [1] * len(tokens) + [0] * len(padding),
        "token_type_ids": types + [0] * len(padding),
        "labels": labels,
    }
    return sample | ({"next_sentence_label": int(is_random)} if binary_head else {})


def make_t5_slowly(
    sentences: list[list[int]],
    target: int,
    tokenizer: Any,
    *,
    length: int,
    length_dec: int,
    mask_prob: float,
    seed: int,
) -> dict[str, Any]:
    random = np.random.RandomState(seed)
    tokens = [token for sentence in sentences for token in sentence][:target]
    budget = min(mask_prob * target, max(1, round(len(tokens) * mask_prob)))
    words = find_words_slowly(tokens, tokenizer, [tokenizer.cls, tokenizer.sep])
    spans = sorted(pick_spans_slowly(words, budget, random, for_t5=True))
    text: list[int] = []
    answer: list[int] = []
    position = 0
    for sentinel, span in zip(tokenizer.additional_special_tokens_ids, spans, strict=False):
        text += [*tokens[position : span[0]], sentinel]
        answer += [sentinel, *(tokens[i] for i in span)]
        position = span[-1] + 1
    text += tokens[position:]
    rest, rest_dec = length - len(text) - 1, length_dec - len(answer) - 1
    return {
        "input_ids": [*text, tokenizer.eos] + [tokenizer.pad] * rest,
        "attention_mask": [1] * (len(text) + 1) + [0] * rest,
        "labels": [*answer, tokenizer.eos] + [-100] * rest_dec,
    }
