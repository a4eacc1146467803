"""BERT's and T5's samples: the sentences of a row of a sentence map, with words masked.

In a BERT sample, ``is_random`` does not mean a sentence from another document: its two segments are
consecutive in the text, and the model predicts whether they were swapped.

In a T5 sample, spans of the text are replaced by numbered sentinels. Under Megatron's names, the
decoder reads ``<bos> <extra_id_0> span <extra_id_1> span`` and predicts ``<extra_id_0> span
<extra_id_1> span <eos>``, with attention masks as matrices. Hugging Face's T5 derives the decoder
input from the labels, starting with the padding token, and has no ``<bos>``; there a sample has the
text, ending with ``</s>`` as its tokenizer does, and the labels ``<extra_id_0> span ... </s>``,
both padded. The length of the target is random too. If it would not fit the decoder, or there are
more spans than sentinels, Megatron stops; here the last spans stay in the text, so that a run of
days does not end at one unlucky sample. All other samples are identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rapidformer.data.indexed import IndexedDataset
from rapidformer.data.pretraining.masking import Masked, Vocabulary, draw_t5_spans, mask_tokens
from rapidformer.errors import ConfigurationError, DataError

Layout = Literal["megatron", "huggingface"]
"""The names in a sample: Megatron's, or those of Hugging Face models."""
IGNORED_LABEL = -100
"""The label that Hugging Face models ignore; Megatron uses a mask instead."""
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
    layout: Layout = "megatron"

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
    def of(cls, tokenizer: Any, layout: Layout) -> BertTokens:
        # Megatron adds two tokens to BERT's vocabulary, and its own models have room for them. A
        # published model does not: used as a random replacement, they would be out of range.
        limit = None if layout == "megatron" else getattr(tokenizer, "own_vocab_size", None)
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
            "text": _pad(masked.tokens, length, self.tokens.pad),
            "types": types,
            "labels": _place(masked, length, -1),
            "is_random": int(is_random),
            "loss_mask": loss_mask,
            "padding_mask": _pad(np.ones(count), length, 0),
            "truncated": int(truncated),
        }

    def _for_huggingface(self, masked: Masked, num_first: int, is_random: bool) -> dict[str, Any]:
        length, count = self.max_seq_length, masked.tokens.size
        types = np.zeros(length, dtype=np.int64)
        types[num_first:count] = 1
        sample: dict[str, Any] = {
            "input_ids": _pad(masked.tokens, length, self.tokens.pad),
            "attention_mask": _pad(np.ones(count), length, 0),
            "token_type_ids": types,
            "labels": _place(masked, length, IGNORED_LABEL),
        }
        if self.binary_head:
            sample["next_sentence_label"] = int(is_random)
        return sample


def truncate_pair(
    first: np.ndarray, second: np.ndarray, length: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Cut the pair to ``length``, a token at a time from the longer, at its front or back."""
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


# --- T5 ------------------------------------------------------------------------------------------


class T5Tokens(NamedTuple):
    """The special tokens of a tokenizer and its words."""

    pad: int
    eos: int
    start: int
    """What the decoder reads first: Megatron's bos, Hugging Face's padding token."""
    sentinels: list[int]
    special: list[int]
    """Tokens that are not words; none for a tokenizer without cls and sep."""
    vocabulary: Vocabulary

    @classmethod
    def of(cls, tokenizer: Any, layout: Layout) -> T5Tokens:
        sentinels = [int(sentinel) for sentinel in tokenizer.additional_special_tokens_ids]
        if not sentinels:
            raise ConfigurationError(
                f"the tokenizer {tokenizer.name} has no sentinels for T5's spans: give "
                "--vocab-extra-ids 100."
            )
        special = [_find(tokenizer, name) for name in ("cls", "sep")]
        return cls(
            pad=int(tokenizer.pad), eos=int(tokenizer.eos),
            start=int(tokenizer.bos if layout == "megatron" else tokenizer.pad),
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
        whole = np.concatenate(sentences).astype(np.int64)
        tokens = whole[:target_length]
        spans = draw_t5_spans(
            tokens, self.tokens.vocabulary, special=self.tokens.special,
            target_length=target_length, mask_prob=self.masked_lm_prob, random=random,
        )  # fmt: skip
        text, answer = self._take_out(tokens, spans)
        if self.layout == "huggingface":
            return self._for_huggingface(text, answer)
        return self._for_megatron(text, answer, whole.size > tokens.size)

    def _take_out(
        self, tokens: np.ndarray, spans: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The text with sentinels, and the spans after theirs; what does not fit stays in place."""
        text: list[np.ndarray] = []
        answer: list[np.ndarray] = []
        position, room = 0, self.max_seq_length_dec - 1  # the start or end of the target
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

    def _for_huggingface(self, text: np.ndarray, answer: np.ndarray) -> dict[str, Any]:
        end = np.array([self.tokens.eos])
        text, answer = np.concatenate([text, end]), np.concatenate([answer, end])
        return {
            "input_ids": _pad(text, self.max_seq_length, self.tokens.pad),
            "attention_mask": _pad(np.ones_like(text), self.max_seq_length, 0),
            "labels": _pad(answer, self.max_seq_length_dec, IGNORED_LABEL),
        }

    def _for_megatron(
        self, text: np.ndarray, answer: np.ndarray, truncated: bool
    ) -> dict[str, Any]:
        length, length_dec = self.max_seq_length, self.max_seq_length_dec
        count_dec = answer.size + 1
        is_text = np.arange(length) < text.size
        is_answer = np.arange(length_dec) < count_dec
        is_past = np.tri(length_dec, dtype=bool)
        return {
            "text_enc": _pad(text, length, self.tokens.pad),
            "text_dec": _pad(np.append(self.tokens.start, answer), length_dec, self.tokens.pad),
            "labels": _pad(np.append(answer, self.tokens.eos), length_dec, -1),
            "loss_mask": is_answer.astype(np.int64),
            "truncated": int(truncated),
            "enc_mask": _outer(is_text, is_text),
            "dec_mask": _outer(is_answer, is_answer) * is_past,
            "enc_dec_mask": _outer(is_answer, is_text),
        }


def _find(tokenizer: Any, name: str) -> int | None:
    try:
        return int(getattr(tokenizer, name))
    except (DataError, AttributeError):
        return None


def _outer(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    product: np.ndarray = rows[:, None] & columns
    return product.astype(np.int64)


def _pad(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    padded = np.full(length, pad, dtype=np.int64)
    padded[: values.size] = values
    return padded
