"""Choose a tokenizer from the flags, and check that its files are there.

With transformers' tokenizers, no special token ([CLS], <s>, ...) is added to a text, although
transformers would: the sample builders and --append-eod add them. A fast one is passed to
`tokenizers` directly, so that a worker need not import transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.schema import to_flag
from rapidformer.data.tokenizers.base import Tokenizer, hash_parts
from rapidformer.data.tokenizers.rust import Gpt2BpeTokenizer, RustTokenizer, WordPieceTokenizer
from rapidformer.data.tokenizers.sentence_piece import SentencePieceTokenizer
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.hub import (
    describe_absence,
    describe_content,
    has_tokenizer,
    is_hub_reachable,
    looks_like_path,
    quiet_transformers,
    suggest_path,
)
from rapidformer.nearest import suggest

# Type -> the settings it requires.
_NEEDS: dict[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "HuggingFaceTokenizer": ("tokenizer_name_or_path",),
}
TOKENIZER_TYPES: tuple[str, ...] = tuple(_NEEDS)
_FILES = ("vocab_file", "merge_file", "tokenizer_model")


def load_tokenizer(args: Settings) -> Tokenizer:
    """What ``get_tokenizer()`` returns: by type and files, by name or path, or the model's."""
    folder = args.tokenizer_name_or_path
    if folder is None and args.tokenizer_type in (None, "HuggingFaceTokenizer"):
        # A model folder in --load takes precedence, as it does for the model itself.
        is_model = (
            args.load is not None and (Path(args.load).expanduser() / "config.json").is_file()
        )
        folder = args.load if is_model else args.pretrained_model_name_or_path
        if folder is None:
            raise ConfigurationError(
                "there is no tokenizer: give --tokenizer-type and --vocab-file (and --merge-file), "
                "--tokenizer-name-or-path, or a model folder that has one."
            )
    return build_tokenizer(
        tokenizer_type=args.tokenizer_type, vocab_file=args.vocab_file, merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model, tokenizer_name_or_path=folder,
        vocab_size=args.vocab_size, vocab_extra_ids=args.vocab_extra_ids,
    )  # fmt: skip


def build_tokenizer(
    *,
    tokenizer_type: str | None = None,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    tokenizer_name_or_path: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
) -> Tokenizer:
    """The tokenizer of that type; without a type, the one the given files imply."""
    settings: dict[str, str | Path | int | None] = {
        "vocab_file": vocab_file, "merge_file": merge_file, "tokenizer_model": tokenizer_model,
        "tokenizer_name_or_path": tokenizer_name_or_path, "vocab_size": vocab_size,
    }  # fmt: skip
    kind = tokenizer_type or None
    if kind is None:
        # Only if the files leave no choice: a vocab.txt may be lower-cased or not.
        if tokenizer_name_or_path is not None:
            kind = "HuggingFaceTokenizer"
        elif merge_file is not None:
            kind = "GPT2BPETokenizer"
    problems = _find_problems(kind, settings)
    if problems:
        raise ConfigurationError(problems)
    files = {name: Path(str(settings[name])).expanduser() for name in _FILES}
    if kind == "NullTokenizer":
        return NumberTokenizer(vocab_size or 0, vocab_extra_ids=vocab_extra_ids)
    if kind == "HuggingFaceTokenizer":
        return load_hugging_face(str(tokenizer_name_or_path), vocab_extra_ids=vocab_extra_ids)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        for_gpt, model = kind.startswith("GPT"), files["tokenizer_model"]
        return SentencePieceTokenizer(model, for_gpt=for_gpt, vocab_extra_ids=vocab_extra_ids)
    vocab = files["vocab_file"]
    if kind == "GPT2BPETokenizer":
        return Gpt2BpeTokenizer(vocab, files["merge_file"], vocab_extra_ids=vocab_extra_ids)
    lower_case = kind == "BertWordPieceLowerCase"
    return WordPieceTokenizer(vocab, lower_case=lower_case, vocab_extra_ids=vocab_extra_ids)


def _find_problems(kind: str | None, settings: Mapping[str, str | Path | int | None]) -> list[str]:
    """Everything that is missing or cannot be read."""
    if kind is None:
        return [
            "no tokenizer: give --tokenizer-type "
            f"({', '.join(TOKENIZER_TYPES)}) and its files, or --tokenizer-name-or-path."
        ]
    if kind not in _NEEDS:
        hint = suggest(kind, TOKENIZER_TYPES) or suggest(f"{kind}Tokenizer", TOKENIZER_TYPES)
        listed = ", ".join(TOKENIZER_TYPES)
        return [f"--tokenizer-type {kind} is unknown: use one of {listed}.{hint}"]
    needs = {to_flag(name): settings[name] for name in _NEEDS[kind]}
    problems = [
        f"--tokenizer-type {kind} needs {flag}." for flag, value in needs.items() if value is None
    ]
    for name, (flag, value) in zip(_NEEDS[kind], needs.items(), strict=True):
        if name in _FILES and value is not None:
            problems += _find_file_problems(flag, Path(str(value)).expanduser())
        elif name == "vocab_size" and value is not None and int(str(value)) < 1:
            problems.append(f"--vocab-size {value} must be at least 1.")
    return problems


def _find_file_problems(flag: str, path: Path) -> list[str]:
    if path.is_dir():
        return [f"{flag} {path} is a folder, not a file."]
    if not path.exists():
        return [f"{flag} {path}: no such file.{suggest_path(path)}"]
    try:
        with path.open("rb") as file:
            return [] if file.read(1) else [f"{flag} {path} is empty."]
    except OSError as error:
        return [f"{flag} {path} cannot be read: {error.strerror}."]


class NumberTokenizer(Tokenizer):
    """Text that already is ids, with spaces between; the id after the last one ends a document."""

    def __init__(self, vocab_size: int, *, vocab_extra_ids: int = 0) -> None:
        vocab = {str(number): number for number in range(vocab_size)}
        vocab["<eod>"] = vocab_size
        self._numbers = vocab_size
        super().__init__("NullTokenizer", vocab, {"eod": vocab_size}, vocab_extra_ids)

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise DataError(
                f"NullTokenizer needs integers separated by spaces, not {text[:40]!r}."
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < self._numbers:
            wrong = next(number for number in ids if not 0 <= number < self._numbers)
            raise DataError(
                f"The id {wrong} is out of range: --vocab-size {self._numbers} allows 0 to "
                f"{self._numbers - 1}."
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(self._get_tokens(ids))


_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def load_hugging_face(location: str, *, vocab_extra_ids: int = 0) -> Tokenizer:
    """The tokenizer of a model folder or Hub name."""
    path = Path(location).expanduser()
    _check_location(location, path)
    from transformers import AutoTokenizer

    is_local = path.exists()
    try:
        with quiet_transformers(str(path)):
            loaded: Any = AutoTokenizer.from_pretrained(
                str(path) if is_local else location,
                local_files_only=is_local or not is_hub_reachable(),
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise DataError(_describe_failure(location, is_local, error)) from error
    return adopt_hugging_face(loaded, vocab_extra_ids=vocab_extra_ids)


def adopt_hugging_face(loaded: Any, *, vocab_extra_ids: int = 0) -> Tokenizer:
    """A transformers tokenizer behind our interface."""
    vocab = dict(loaded.get_vocab())
    special = {
        key: getattr(loaded, f"{key}_token_id", None)
        for key in ("cls", "sep", "pad", "mask", "bos", "eos")
    }
    special["eod"] = special["eos"]
    has = sum(1 for token in vocab if _SENTINEL.fullmatch(token))
    extra = max(vocab_extra_ids, has)
    if getattr(loaded, "is_fast", False):
        from tokenizers import Tokenizer as Backend

        # A copy: what we turn off must stay on in the user's own object.
        backend = Backend.from_str(loaded.backend_tokenizer.to_str())
        return RustTokenizer("HuggingFaceTokenizer", backend, vocab, special, extra)
    return PythonTokenizer(loaded, vocab, special, extra)


class PythonTokenizer(Tokenizer):
    """A tokenizer that transformers runs in Python: correct, but slow."""

    def __init__(
        self, loaded: Any, vocab: dict[str, int], special: Mapping[str, int | None], extra_ids: int
    ) -> None:
        super().__init__("HuggingFaceTokenizer", vocab, special, extra_ids)
        self._loaded = loaded

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        encoded = self._loaded(
            texts, add_special_tokens=False, truncation=False, padding=False, verbose=False
        )
        return encoded["input_ids"]

    def detokenize(self, ids: Sequence[int]) -> str:
        self._get_tokens(ids)
        return str(self._loaded.decode([int(i) for i in ids]))

    @property
    def fingerprint(self) -> str:
        return hash_parts([repr(self._loaded), super().fingerprint])


def _check_location(location: str, path: Path) -> None:
    flag = f"--tokenizer-name-or-path {location}"
    if path.is_file():
        raise DataError(f"{flag} is a file: give the folder that contains it.")
    if path.is_dir() and not has_tokenizer(path):
        raise DataError(
            f"{flag} lacks a tokenizer (tokenizer.json or vocab.txt): it holds "
            f"{describe_content(path)}."
        )
    if not path.exists() and looks_like_path(location):
        raise DataError(f"{flag}: no such folder.{suggest_path(path)}")


def _describe_failure(location: str, is_local: bool, error: Exception) -> str:
    if not is_local and isinstance(error, OSError):
        flag, is_reachable = "--tokenizer-name-or-path", is_hub_reachable()
        return describe_absence(f"tokenizer {location}", location, flag, is_reachable=is_reachable)
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            f"The tokenizer of {location} comes with its own Python code, which is not run here. "
            "If it is a fast one, tokenizer.backend_tokenizer.save('FOLDER/tokenizer.json') makes "
            "one without code, for --tokenizer-name-or-path FOLDER."
        )
    return f"The tokenizer of {location} cannot be loaded: {text[:300]}"
