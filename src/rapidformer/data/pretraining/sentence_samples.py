"""BERT's and T5's samples: the sentences of a row of a sentence map, with words masked.

In a BERT sample, ``is_random`` does not mean a sentence from another document: its two segments are
consecutive in the text, and the model predicts whether they were swapped.

In a T5 sample, spans of the text are replaced by numbered sentinels. It has the text, ending with
``</s>`` as T5's tokenizer does, and the labels ``<extra_id_0> span ... </s>``, both padded: Hugging
Face's T5 derives the decoder input from the labels, starting with the padding token. The length of
the target is random too. If it would not fit the decoder, or there are more spans than sentinels,
Megatron stops; here the last spans stay in the text, so that a run of days does not end at one
unlucky sample. All other samples are identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.indexed import IndexedDataset
from rapidformer.data.pretraining.masking import Vocabulary, draw_t5_spans, mask_tokens
from rapidformer.errors import ConfigurationError, DataError

IGNORED_LABEL = -100
ADDED_BY_BERT = 3
"""[CLS] A [SEP] B [SEP]"""
ADDED_BY_T5 = 2
_SHORTEST_ANSWER = 3
"""A start, a sentinel and one token."""


@dataclass(frozen=True, eq=False, repr=False)
class SentenceDataset:
    """Samples of a sentence map; one depends only on the seed and its own index."""

    data: IndexedDataset
    maps: Mapping[str, np.ndarray]
    _: KW_ONLY
    max_seq_length: int
    masked_lm_prob: float
    seed: int

    def __len__(self) -> int:
        return len(self.maps["rows"])

    def read(self, index: int) -> tuple[list[np.ndarray], int, np.random.RandomState]:
        """The sentences of a sample, its target length and its random numbers."""
        rows = self.maps["rows"]
        if not -len(rows) <= index < len(rows):
            raise IndexError(f"sample {index} of {len(rows)}")
        index %= len(rows)
        start, end, target_length = rows[index].tolist()
        random = np.random.RandomState((self.seed + index) % 2**32)
        return self.data[start:end], target_length, random


# --- BERT ----------------------------------------------------------------------------------------


class BertTokens(NamedTuple):
    """The special tokens of a tokenizer and its words."""

    cls: int
    sep: int
    mask: int
    pad: int
    vocabulary: Vocabulary

    @classmethod
    def of(cls, tokenizer: Any) -> BertTokens:
        # Megatron adds two tokens to BERT's vocabulary, for which a published model has no room:
        # used as a random replacement, they would be out of range.
        limit = getattr(tokenizer, "own_vocab_size", None)
        return cls(
            cls=int(tokenizer.cls), sep=int(tokenizer.sep), mask=int(tokenizer.mask),
            pad=int(tokenizer.pad), vocabulary=Vocabulary.of(tokenizer, limit),
        )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class BertDataset(SentenceDataset):
    """Pairs of segments, with a label for their order if there is a ``binary_head``."""

    tokens: BertTokens
    _: KW_ONLY
    binary_head: bool = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        sentences, target_length, random = self.read(index)
        first, second, is_random = self._join(sentences, random)
        first, second = truncate_pair(first, second, target_length, random)
        separator = np.array([self.tokens.sep])
        parts = [np.array([self.tokens.cls]), first, separator]
        if second.size:
            parts += [second, separator]
        masked = mask_tokens(
            np.concatenate(parts), self.tokens.vocabulary, mask_id=self.tokens.mask,
            special=(self.tokens.cls, self.tokens.sep), target_length=target_length,
            mask_prob=self.masked_lm_prob, random=random,
        )  # fmt: skip
        length, count = self.max_seq_length, masked.tokens.size
        types = np.zeros(length, dtype=np.int64)
        types[first.size + 2 : count] = 1
        labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
        labels[masked.positions] = masked.labels
        sample: dict[str, Any] = {
            "input_ids": _pad(masked.tokens, length, self.tokens.pad),
            "attention_mask": _pad(np.ones(count), length, 0),
            "token_type_ids": types,
            "labels": labels,
        }
        if self.binary_head:
            sample["next_sentence_label"] = int(is_random)
        return sample

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


def truncate_pair(
    first: np.ndarray, second: np.ndarray, length: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the pair to ``length``, a token at a time from the longer, at its front or back."""
    surplus = first.size + second.size - length
    if surplus <= 0:
        return first, second
    from_front = random.random_sample(surplus) < 0.5
    difference = min(abs(first.size - second.size), surplus)
    is_second = np.zeros(surplus, dtype=bool)
    is_second[:difference] = second.size > first.size
    is_second[difference::2] = True
    return _cut(first, from_front[~is_second]), _cut(second, from_front[is_second])


def _cut(tokens: np.ndarray, from_front: np.ndarray) -> np.ndarray:
    front = int(from_front.sum())
    return tokens[front : tokens.size - (from_front.size - front)]


# --- T5 ------------------------------------------------------------------------------------------


class T5Tokens(NamedTuple):
    """The special tokens of a tokenizer and its words."""

    pad: int
    eos: int
    sentinels: list[int]
    special: list[int]
    """Tokens that are not words; none for a tokenizer without cls and sep."""
    vocabulary: Vocabulary

    @classmethod
    def of(cls, tokenizer: Any) -> T5Tokens:
        sentinels = [int(sentinel) for sentinel in tokenizer.additional_special_tokens_ids]
        if not sentinels:
            raise ConfigurationError(
                f"the tokenizer {tokenizer.name} has no sentinels for T5's spans: give "
                "--vocab-extra-ids 100."
            )
        special = [_find(tokenizer, name) for name in ("cls", "sep")]
        return cls(
            pad=int(tokenizer.pad), eos=int(tokenizer.eos),
            sentinels=sentinels, special=[token for token in special if token is not None],
            vocabulary=Vocabulary.of(tokenizer),
        )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class T5Dataset(SentenceDataset):
    """Texts without some of their spans, and the spans."""

    tokens: T5Tokens
    _: KW_ONLY
    max_seq_length_dec: int

    def __post_init__(self) -> None:
        if self.max_seq_length_dec < _SHORTEST_ANSWER:
            raise ConfigurationError(
                f"the decoder's length {self.max_seq_length_dec} cannot hold an answer: at least "
                f"{_SHORTEST_ANSWER} tokens are needed."
            )

    def __getitem__(self, index: int) -> dict[str, Any]:
        sentences, target_length, random = self.read(index)
        tokens = np.concatenate(sentences).astype(np.int64)[:target_length]
        spans = draw_t5_spans(
            tokens, self.tokens.vocabulary, special=self.tokens.special,
            target_length=target_length, mask_prob=self.masked_lm_prob, random=random,
        )  # fmt: skip
        end = np.array([self.tokens.eos])
        text, answer = (np.concatenate([part, end]) for part in self._take_out(tokens, spans))
        return {
            "input_ids": _pad(text, self.max_seq_length, self.tokens.pad),
            "attention_mask": _pad(np.ones_like(text), self.max_seq_length, 0),
            "labels": _pad(answer, self.max_seq_length_dec, IGNORED_LABEL),
        }

    def _take_out(
        self, tokens: np.ndarray, spans: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The text with sentinels, and the spans after theirs; what does not fit stays in place."""
        text: list[np.ndarray] = []
        answer: list[np.ndarray] = []
        position, room = 0, self.max_seq_length_dec - 1  # the end of the target
        for sentinel, span in zip(self.tokens.sentinels, spans, strict=False):
            room -= span.size + 1
            if room < 0:
                break
            mark = np.array([sentinel])
            text += [tokens[position : span[0]], mark]
            answer += [mark, tokens[span]]
            position = int(span[-1]) + 1
        nothing = np.zeros(0, dtype=np.int64)
        return np.concatenate([*text, tokens[position:]]), np.concatenate([nothing, *answer])


def _find(tokenizer: Any, name: str) -> int | None:
    try:
        return int(getattr(tokenizer, name))
    except (DataError, AttributeError):
        return None


def _pad(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    padded = np.full(length, pad, dtype=np.int64)
    padded[: values.size] = values
    return padded
