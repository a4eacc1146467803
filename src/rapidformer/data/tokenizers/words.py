"""Cache the ids of words: several times faster than asking the library for every text.

This never decides what the ids are, only where a text may be cut without changing them. GPT-2's and
BERT's rules cut ASCII text into words that a plain regular expression finds; words with other
characters are cut out whole, at whitespace, and looked up in the library. Any other tokenizer is
left alone (`build_word_memory` returns None).
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

# A worker's cache holds this many words (about 50 MB); frequent words come early.
_REMEMBERED = 200_000
_LONGEST = 48
# Longer ones rarely recur: scripts without spaces between words.
_LONG = 16

# What the library's regular expressions treat as whitespace, which differs from Python.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_GPT2_WORDS = re.compile(
    r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
_GPT2_PIECES = re.compile(
    # As many consecutive ASCII words as possible, or one word of anything, or the rest. Whitespace
    # goes with the following word: every rule of GPT-2 has a boundary before it.
    rf"(?:[\t-\r ]*+[^{_SPACE}\x80-\U0010ffff]++(?=[{_SPACE}]|\Z))++"
    rf"|[{_SPACE}]*+[^{_SPACE}]++|[{_SPACE}]++"
)
_BERT_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
# BERT puts spaces around these characters: each is a word.
_HAN = r"\u3400-\u4dbf\u4e00-\u9fff"
_BERT_PIECES = re.compile(
    rf"(?:[\t\n\r ]*+[^\t\n\r \x80-\U0010ffff]++(?=[\t\n\r {_HAN}]|\Z))++"
    rf"|[{_HAN}]|[^\t\n\r {_HAN}]++"
)
# BERT drops these and joins what is around them.
_CONTROLS = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")


class WordMemory(dict[str, list[int]]):
    """Maps words to ids; an unknown word is looked up in the library."""

    def __init__(self, backend: tokenizers.Tokenizer, *, is_bert: bool) -> None:
        super().__init__()
        self._backend = backend
        self._words = _BERT_WORDS if is_bert else _GPT2_WORDS
        self._pieces = _BERT_PIECES if is_bert else _GPT2_PIECES
        self._is_bert = is_bert
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._backend.encode(word, add_special_tokens=False).ids
        if len(self) < _REMEMBERED and len(word) <= _LONGEST:
            self[word] = ids
        return ids

    def tokenize(self, text: str) -> list[int] | None:
        """The ids the library would give; None if asking it is faster."""
        words = self.find_words(text)
        return None if words is None else list(chain.from_iterable(map(self.__getitem__, words)))

    def find_words(self, text: str) -> list[str] | None:
        """The text, cut where the library would cut it too; None if it is better not cut."""
        if self._added is not None and self._added.search(text):
            return None
        if self._is_bert and _CONTROLS.search(text):
            text = _CONTROLS.sub("", text)
        return self._words.findall(text) if text.isascii() else self._cut(text)

    def _cut(self, text: str) -> list[str] | None:
        """The words of a text that is not all ASCII, unless long words dominate it."""
        words: list[str] = []
        in_long_words = 0
        for piece in self._pieces.findall(text):
            if piece.isascii():
                words += self._words.findall(piece)
            else:
                words.append(piece)
                in_long_words += len(piece) if len(piece) > _LONG else 0
        return words if 2 * in_long_words <= len(text) else None


def build_word_memory(backend: tokenizers.Tokenizer) -> WordMemory | None:
    """A cache for a tokenizer with GPT-2's or BERT's rules; None for any other."""
    from tokenizers import models, normalizers, pre_tokenizers

    cutter, model, normalizer = backend.pre_tokenizer, backend.model, backend.normalizer
    if any(token.normalized for token in backend.get_added_tokens_decoder().values()):
        return None
    if type(cutter) is pre_tokenizers.ByteLevel and type(model) is models.BPE:
        is_plain = cutter.use_regex and not cutter.add_prefix_space and not model.dropout
        return WordMemory(backend, is_bert=False) if is_plain and normalizer is None else None
    if type(cutter) is pre_tokenizers.BertPreTokenizer and type(model) is models.WordPiece:
        is_bert = type(normalizer) is normalizers.BertNormalizer and (
            normalizer.clean_text and normalizer.handle_chinese_chars
        )
        return WordMemory(backend, is_bert=True) if is_bert else None
    return None
