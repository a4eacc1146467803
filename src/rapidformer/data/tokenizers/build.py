"""Choose a tokenizer from the flags, and check that its files are there."""

from __future__ import annotations

import difflib
from pathlib import Path

from rapidformer.data.tokenizers.base import Tokenizer
from rapidformer.errors import ConfigurationError
from rapidformer.hub import suggest_path

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
    given: dict[str, str | int | None] = {
        "vocab_file": _as_text(vocab_file),
        "merge_file": _as_text(merge_file),
        "tokenizer_model": _as_text(tokenizer_model),
        "tokenizer_name_or_path": tokenizer_name_or_path,
        "vocab_size": vocab_size,
    }
    kind = tokenizer_type or _infer_type(given)
    problems = find_tokenizer_problems(kind, given)
    if problems:
        raise ConfigurationError(problems)
    return _build(str(kind), given, vocab_extra_ids)


def find_tokenizer_problems(
    tokenizer_type: str | None, given: dict[str, str | int | None]
) -> list[str]:
    """Everything that is missing or cannot be read."""
    if tokenizer_type is None:
        return [
            "no tokenizer: give --tokenizer-type "
            f"({', '.join(TOKENIZER_TYPES)}) and its files, or --tokenizer-name-or-path."
        ]
    if tokenizer_type not in _NEEDS:
        near = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        return [
            f"--tokenizer-type {tokenizer_type} is unknown: use one of "
            f"{', '.join(TOKENIZER_TYPES)}.{hint}"
        ]
    problems = [
        f"--tokenizer-type {tokenizer_type} needs {_flag(name)}."
        for name in _NEEDS[tokenizer_type]
        if given.get(name) is None
    ]
    for name in _NEEDS[tokenizer_type]:
        value = given.get(name)
        if name in _FILES and value is not None:
            problems += _find_file_problems(name, Path(str(value)).expanduser())
    size = given.get("vocab_size")
    if "vocab_size" in _NEEDS[tokenizer_type] and size is not None and int(size) < 1:
        problems.append(f"--vocab-size {size} must be at least 1.")
    return problems


def _find_file_problems(name: str, path: Path) -> list[str]:
    if path.is_dir():
        return [f"{_flag(name)} {path} is a folder, not a file."]
    if not path.exists():
        return [f"{_flag(name)} {path}: no such file.{suggest_path(path)}"]
    try:
        with path.open("rb") as file:
            return [] if file.read(1) else [f"{_flag(name)} {path} is empty."]
    except OSError as error:
        return [f"{_flag(name)} {path} cannot be read: {error.strerror}."]


def _infer_type(given: dict[str, str | int | None]) -> str | None:
    """Only if the files leave no choice: a vocab.txt may be lower-cased or not."""
    if given["tokenizer_name_or_path"] is not None:
        return "HuggingFaceTokenizer"
    if given["merge_file"] is not None:
        return "GPT2BPETokenizer"
    return None


def _build(kind: str, given: dict[str, str | int | None], extra: int) -> Tokenizer:
    files = {name: Path(str(given[name])).expanduser() for name in _FILES}
    if kind == "NullTokenizer":
        from rapidformer.data.tokenizers.numbers import NumberTokenizer

        return NumberTokenizer(int(given["vocab_size"] or 0), vocab_extra_ids=extra)
    if kind == "HuggingFaceTokenizer":
        from rapidformer.data.tokenizers.hugging_face import load_hugging_face

        return load_hugging_face(str(given["tokenizer_name_or_path"]), vocab_extra_ids=extra)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        from rapidformer.data.tokenizers.sentence_piece import SentencePieceTokenizer

        for_gpt = kind.startswith("GPT")
        return SentencePieceTokenizer(
            files["tokenizer_model"], for_gpt=for_gpt, vocab_extra_ids=extra
        )
    from rapidformer.data.tokenizers.rust import Gpt2BpeTokenizer, WordPieceTokenizer

    if kind == "GPT2BPETokenizer":
        return Gpt2BpeTokenizer(files["vocab_file"], files["merge_file"], vocab_extra_ids=extra)
    lower_case = kind == "BertWordPieceLowerCase"
    return WordPieceTokenizer(files["vocab_file"], lower_case=lower_case, vocab_extra_ids=extra)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _as_text(value: str | Path | None) -> str | None:
    return None if value is None else str(value)
