"""WordPiece and byte-level BPE on the `tokenizers` library, from BERT's and GPT-2's files.

The library's object knows none of the special tokens, so "[MASK]" or "<|endoftext|>" in a corpus is
split like any other text, as in Megatron; transformers would make them special tokens. WordPiece
words may have 200 characters, as in Google's BERT and in Megatron; the library's own limit is 100.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.data.tokenizers.base import Tokenizer, add_tokens, hash_parts
from rapidformer.errors import DataError
from rapidformer.strict_json import parse_json

if TYPE_CHECKING:
    import tokenizers

_CHARACTERS_PER_WORD = 200
_NEEDED_BY_BERT = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_END_OF_TEXT = "<|endoftext|>"


class RustTokenizer(Tokenizer):
    """Any tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        vocab: dict[str, int],
        special: Mapping[str, int | None],
        vocab_extra_ids: int = 0,
    ) -> None:
        super().__init__(name, vocab, special, vocab_extra_ids)
        # Length settings in a tokenizer.json are meant for a model's input, not for a corpus.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._memory = build_word_memory(backend)
        # The backend does not know the tokens appended here, and drops them.
        self._appended = {i for i in self.vocab.values() if backend.id_to_token(i) is None}

    @property
    def own_vocab_size(self) -> int:
        return min(self._appended, default=self.vocab_size)

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        if self._memory is None:
            return self._ask(texts)
        known = [self._memory.tokenize(text) for text in texts]
        unknown = [text for text, ids in zip(texts, known, strict=True) if ids is None]
        asked = iter(self._ask(unknown))
        return [next(asked) if ids is None else ids for ids in known]

    def _ask(self, texts: list[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        tokens = self._get_tokens(ids)
        text, run = "", list[int]()
        for token_id, token in zip(ids, tokens, strict=True):
            if token_id in self._appended:
                text += self._backend.decode(run, skip_special_tokens=False) + token
                run = []
            else:
                run.append(int(token_id))
        return text + self._backend.decode(run, skip_special_tokens=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._memory = build_word_memory(self._backend)

    @property
    def fingerprint(self) -> str:
        special = sorted(self._special.items())
        return hash_parts(["rust", self._backend.to_str(), repr(special), str(self.vocab_size)])


class WordPieceTokenizer(RustTokenizer):
    """BERT's WordPiece, lower-cased or not; ``[BOS]`` and ``[EOS]`` are appended if missing."""

    def __init__(self, vocab_file: Path, *, lower_case: bool, vocab_extra_ids: int = 0) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import models, normalizers, pre_tokenizers

        pieces = _load_wordpieces(vocab_file)
        _check_has(pieces, [*_NEEDED_BY_BERT.values(), "[UNK]"], vocab_file)
        model = models.WordPiece(
            pieces, unk_token="[UNK]", max_input_chars_per_word=_CHARACTERS_PER_WORD
        )
        backend = Backend(model)
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=lower_case,
            lowercase=lower_case,
        )  # fmt: skip
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        vocab = dict(pieces)
        add_tokens(vocab, ["[BOS]", "[EOS]"])
        special = {key: vocab[token] for key, token in _NEEDED_BY_BERT.items()}
        special |= {"bos": vocab["[BOS]"], "eos": vocab["[EOS]"], "eod": vocab["[EOS]"]}
        name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        super().__init__(name, backend, vocab, special, vocab_extra_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(self._get_tokens(ids)).replace(" ##", "")


class Gpt2BpeTokenizer(RustTokenizer):
    """GPT-2's byte-level BPE; ``<|endoftext|>`` ends a document."""

    def __init__(self, vocab_file: Path, merge_file: Path, *, vocab_extra_ids: int = 0) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        vocab = _load_json_vocabulary(vocab_file)
        merges = _load_merges(merge_file)
        _check_has(vocab, [_END_OF_TEXT], vocab_file)
        unknown = min(vocab, key=lambda token: vocab[token])
        try:
            # A byte missing from the vocabulary becomes its first token, as in Megatron, not
            # nothing.
            model = models.BPE(dict(vocab), merges, unk_token=unknown)
        except Exception as error:  # the library raises a bare Exception for any mismatch
            raise DataError(
                f"{merge_file} does not match {vocab_file}: {error}. Give the two files of one "
                "tokenizer."
            ) from error
        backend = Backend(model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        end = vocab[_END_OF_TEXT]
        special = {"eod": end, "eos": end}
        super().__init__("GPT2BPETokenizer", backend, vocab, special, vocab_extra_ids)


def _check_has(vocab: Mapping[str, int], tokens: list[str], file: Path) -> None:
    missing = [token for token in tokens if token not in vocab]
    if missing:
        raise DataError(
            f"The vocabulary {file} ({len(vocab)} tokens) lacks {', '.join(missing)}: is it the "
            "vocabulary of this --tokenizer-type?"
        )


def _load_wordpieces(path: Path) -> dict[str, int]:
    """One piece per line; the id is the line number, from 0."""
    # Only newlines end a line: U+2028 and similar characters are pieces of some vocabularies.
    lines = _read_text(path).removesuffix("\n").split("\n")
    vocab = {line.strip(): number for number, line in enumerate(lines)}
    if len(vocab) == 1 and "{" in next(iter(vocab)):
        raise DataError(
            f"The vocabulary {path} is JSON, but WordPiece needs one piece per line (vocab.txt)."
        )
    return vocab


def _load_json_vocabulary(path: Path) -> dict[str, int]:
    """GPT-2's vocab.json: an object that maps tokens to ids."""
    try:
        vocab = parse_json(_read_text(path))
    except ValueError as error:
        raise DataError(
            f"The vocabulary {path} is not JSON ({error}): BPE needs a vocab.json with tokens and "
            "ids."
        ) from None
    if not isinstance(vocab, dict) or not vocab:
        raise DataError(f'The vocabulary {path} must be a JSON object such as {{"the": 262}}.')
    wrong = next((token for token, number in vocab.items() if type(number) is not int), None)
    if wrong is not None:
        raise DataError(
            f"The vocabulary {path} gives {wrong!r} the id {vocab[wrong]!r}: ids are whole numbers."
        )
    return vocab


def _load_merges(path: Path) -> list[tuple[str, str]]:
    """GPT-2's merges.txt: two pieces per line, the most frequent pair first."""
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(
                f"{path}, line {number}: a merge is two pieces with a blank between, but this is "
                f"{line[:40]!r}."
            )
        merges.append((pair[0], pair[1]))
    return merges


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}): it is no vocabulary."
        ) from None


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
    """Maps words to ids, several times faster than the library, which is asked for unknown words.

    It never decides what the ids are, only where a text may be cut without changing them: ASCII
    words by a regular expression, words with other characters whole, at whitespace.
    """

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
