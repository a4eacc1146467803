"""BERT samples: two segments of a document, possibly swapped, with some tokens masked.

``is_random`` does not mean a sentence from another document: the two segments are consecutive in
the text, and the model predicts whether they were swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.pretraining.masking import Masked, Vocabulary, mask_tokens
from rapidformer.data.pretraining.sentence_dataset import (
    IGNORED_LABEL,
    Layout,
    SentenceDataset,
    pad_row,
)

ADDED_TOKENS = 3
"""[CLS] A [SEP] B [SEP]"""


class BertTokens(NamedTuple):
    """The special tokens of a tokenizer and its words."""

    cls: int
    sep: int
    mask: int
    pad: int
    vocabulary: Vocabulary

    @classmethod
    def of(cls, tokenizer: Any, layout: Layout) -> BertTokens:
        # Megatron adds two tokens to BERT's vocabulary, and its own models have room for them. A
        # published model does not: used as a random replacement, they would be out of range.
        limit = None if layout == "megatron" else getattr(tokenizer, "own_vocab_size", None)
        return cls(
            cls=int(tokenizer.cls), sep=int(tokenizer.sep), mask=int(tokenizer.mask),
            pad=int(tokenizer.pad), vocabulary=Vocabulary.of(tokenizer, limit),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class BertDataset(SentenceDataset):
    """Pairs of segments, with a label for their order if there is a ``binary_head``."""

    tokens: BertTokens
    _: KW_ONLY
    binary_head: bool = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        sentences, target_length, random = self.read(index)
        first, second, is_random = self._join(sentences, random)
        first, second, truncated = truncate_pair(first, second, target_length, random)
        separator = np.array([self.tokens.sep])
        parts = [np.array([self.tokens.cls]), first, separator]
        if second.size:
            parts += [second, separator]
        masked = mask_tokens(
            np.concatenate(parts), self.tokens.vocabulary, mask_id=self.tokens.mask,
            special=(self.tokens.cls, self.tokens.sep), target_length=target_length,
            mask_prob=self.masked_lm_prob, random=random,
        )  # fmt: skip
        if self.layout == "huggingface":
            return self._for_huggingface(masked, first.size + 2, is_random)
        return self._for_megatron(masked, first.size + 2, is_random, truncated)

    def _join(
        self, sentences: Sequence[np.ndarray], random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """The two segments, and whether they are swapped."""
        if not self.binary_head:
            return np.concatenate(sentences).astype(np.int64), np.zeros(0, dtype=np.int64), False
        border = 1 if len(sentences) < 3 else random.randint(1, len(sentences))
        first = np.concatenate(sentences[:border]).astype(np.int64)
        second = np.concatenate(sentences[border:]).astype(np.int64)
        if random.random_sample() < 0.5:
            return second, first, True
        return first, second, False

    def _for_megatron(
        self, masked: Masked, num_first: int, is_random: bool, truncated: bool
    ) -> dict[str, Any]:
        length, count = self.max_seq_length, masked.tokens.size
        types = np.full(length, self.tokens.pad, dtype=np.int64)  # Megatron pads these with it too
        types[:num_first], types[num_first:count] = 0, 1
        loss_mask = np.zeros(length, dtype=np.int64)
        loss_mask[masked.positions] = 1
        return {
            "text": pad_row(masked.tokens, length, self.tokens.pad),
            "types": types,
            "labels": _place(masked, length, -1),
            "is_random": int(is_random),
            "loss_mask": loss_mask,
            "padding_mask": pad_row(np.ones(count), length, 0),
            "truncated": int(truncated),
        }

    def _for_huggingface(self, masked: Masked, num_first: int, is_random: bool) -> dict[str, Any]:
        length, count = self.max_seq_length, masked.tokens.size
        types = np.zeros(length, dtype=np.int64)
        types[num_first:count] = 1
        sample: dict[str, Any] = {
            "input_ids": pad_row(masked.tokens, length, self.tokens.pad),
            "attention_mask": pad_row(np.ones(count), length, 0),
            "token_type_ids": types,
            "labels": _place(masked, length, IGNORED_LABEL),
        }
        if self.binary_head:
            sample["next_sentence_label"] = int(is_random)
        return sample


def truncate_pair(
    first: np.ndarray, second: np.ndarray, length: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Cut the pair to ``length`` tokens, one at a time from the longer, at its front or back.

    Which segment loses each token is known in advance (the longer until both are equal, then the
    second and the first in turn); only front or back is random.
    """
    surplus = first.size + second.size - length
    if surplus <= 0:
        return first, second, False
    from_front = random.random_sample(surplus) < 0.5
    difference = min(abs(first.size - second.size), surplus)
    is_second = np.zeros(surplus, dtype=bool)
    is_second[:difference] = second.size > first.size
    is_second[difference::2] = True
    return _cut(first, from_front[~is_second]), _cut(second, from_front[is_second]), True


def _cut(tokens: np.ndarray, from_front: np.ndarray) -> np.ndarray:
    front = int(from_front.sum())
    return tokens[front : tokens.size - (from_front.size - front)]


def _place(masked: Masked, length: int, ignored: int) -> np.ndarray:
    labels = np.full(length, ignored, dtype=np.int64)
    labels[masked.positions] = masked.labels
    return labels
