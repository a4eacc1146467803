"""T5 samples: spans of the text are replaced by numbered sentinels.

Under Megatron's names, the decoder reads ``<bos> <extra_id_0> span <extra_id_1> span`` and predicts
``<extra_id_0> span <extra_id_1> span <eos>``, with attention masks as matrices. Hugging Face's T5
derives the decoder input from the labels, starting with the padding token, and has no ``<bos>``;
there a sample has the text, ending with ``</s>`` as its tokenizer does, and the labels
``<extra_id_0> span ... </s>``, both padded.

The length of the target is random too. If it would not fit the decoder, or there are more spans
than sentinels, Megatron stops; here the last spans stay in the text, so that a run of days does not
end at one unlucky sample. All other samples are identical.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np

from rapidformer.data.pretraining.masking import Vocabulary, draw_t5_spans
from rapidformer.data.pretraining.sentence_dataset import (
    IGNORED_LABEL,
    Layout,
    SentenceDataset,
    pad_row,
)
from rapidformer.errors import ConfigurationError, DataError

ADDED_TOKENS = 2
_SHORTEST_ANSWER = 3
"""A start, a sentinel and one token."""


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


@dataclass(frozen=True, eq=False)
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
            "input_ids": pad_row(text, self.max_seq_length, self.tokens.pad),
            "attention_mask": pad_row(np.ones_like(text), self.max_seq_length, 0),
            "labels": pad_row(answer, self.max_seq_length_dec, IGNORED_LABEL),
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
            "text_enc": pad_row(text, length, self.tokens.pad),
            "text_dec": pad_row(np.append(self.tokens.start, answer), length_dec, self.tokens.pad),
            "labels": pad_row(np.append(answer, self.tokens.eos), length_dec, -1),
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
