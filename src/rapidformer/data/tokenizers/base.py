"""What every tokenizer offers: ids for text, text for ids, and the ids of its special tokens.

Text is only ever text here. A special token spelled out in a corpus does not become that token,
unless the tokenizer type says so; only the sample builders insert special tokens.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from rapidformer.errors import DataError

_MEANINGS = {
    "eod": "end-of-document", "cls": "classification (CLS)", "sep": "separator (SEP)",
    "pad": "padding", "mask": "mask", "bos": "beginning-of-sequence", "eos": "end-of-sequence",
}  # fmt: skip


class _SpecialToken:
    """The id of a special token, by the attribute's name; an error if the tokenizer has none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tokenizer: Tokenizer, owner: type) -> int:
        if not tokenizer.has_special(self._name):
            raise DataError(
                f"The tokenizer {tokenizer.name} has no {_MEANINGS[self._name]} token "
                f"({self._name}); of the special tokens it has: "
                f"{', '.join(tokenizer._special) or 'none'}. Choose another tokenizer or another "
                "task."
            )
        return tokenizer._special[self._name]


class Tokenizer(ABC):
    """Text to ids and back, with Megatron's names for the special tokens."""

    eod, cls, sep, pad = _SpecialToken(), _SpecialToken(), _SpecialToken(), _SpecialToken()
    mask, bos, eos = _SpecialToken(), _SpecialToken(), _SpecialToken()

    def __init__(
        self,
        name: str,
        vocab: dict[str, int],
        special: Mapping[str, int | None],
        vocab_extra_ids: int = 0,
    ) -> None:
        """``special`` maps eod, cls, ... to ids or None; ``vocab_extra_ids`` appends sentinels."""
        self.name = name
        self.vocab = vocab
        self._special = {key: value for key, value in special.items() if value is not None}
        self._sentinels = [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]
        add_tokens(vocab, self._sentinels)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.vocab.values(), default=-1) + 1

    @property
    def own_vocab_size(self) -> int:
        """The size before this library added any token: what a published model has room for."""
        return self.vocab_size

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Tokens by id."""
        return {token_id: token for token, token_id in self.vocab.items()}

    @cached_property
    def word_starts(self) -> np.ndarray:
        """For each id, whether its token starts a word: all but WordPiece's ``##`` pieces do."""
        starts = np.ones(self.vocab_size, dtype=bool)
        for token, token_id in self.vocab.items():
            starts[token_id] = not token.startswith("##")
        return starts

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """The ids of T5's sentinels, starting with ``<extra_id_0>``."""
        return [self.vocab[token] for token in self._sentinels]

    def has_special(self, name: str) -> bool:
        """Whether there is such a token; ``name`` is eod, cls, sep, pad, mask, bos or eos."""
        return name in self._special

    @abstractmethod
    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of one text, without special tokens."""
        return self.tokenize_batch([text])[0]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text for ids; special tokens stay visible."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that produce the same ids."""
        return hash_parts([type(self).__name__, json.dumps(sorted(self.vocab.items()))])

    def _get_tokens(self, ids: Sequence[int]) -> list[str]:
        try:
            return [self.inv_vocab[int(token_id)] for token_id in ids]
        except KeyError as missing:
            raise DataError(
                f"The token id {missing.args[0]} is not in the vocabulary of {self.name} "
                f"({self.vocab_size} tokens): these ids were made with another tokenizer."
            ) from None


def add_tokens(vocab: dict[str, int], tokens: Iterable[str]) -> None:
    """Append tokens that are missing, with ids after the last one."""
    following = max(vocab.values(), default=-1) + 1
    for token in tokens:
        if token not in vocab:
            vocab[token] = following
            following += 1


def hash_parts(parts: Iterable[str | bytes]) -> str:
    """One hash of several texts, with unambiguous boundaries."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
