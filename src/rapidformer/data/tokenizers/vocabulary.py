"""Vocabulary files: BERT's list of pieces, GPT-2's vocab.json and merges.txt."""

from __future__ import annotations

import json
from pathlib import Path

from rapidformer.errors import DataError


def load_wordpieces(path: Path) -> dict[str, int]:
    """One piece per line; the id is the line number, from 0."""
    # Only newlines end a line: U+2028 and similar characters are pieces of some vocabularies.
    with path.open(encoding="utf-8") as file:
        try:
            lines = file.read().removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(_describe_encoding(path, error)) from None
    vocab = {line.strip(): number for number, line in enumerate(lines)}
    if len(vocab) == 1 and "{" in next(iter(vocab)):
        raise DataError(
            f"The vocabulary {path} is JSON, but WordPiece needs one piece per line (vocab.txt)."
        )
    return vocab


def load_json_vocabulary(path: Path) -> dict[str, int]:
    """GPT-2's vocab.json: an object that maps tokens to ids."""
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(_describe_encoding(path, error)) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"The vocabulary {path} is not JSON (line {error.lineno}: {error.msg}): BPE needs a "
            "vocab.json with tokens and ids."
        ) from None
    if not isinstance(vocab, dict) or not vocab:
        raise DataError(f'The vocabulary {path} must be a JSON object such as {{"the": 262}}.')
    wrong = next((token for token, number in vocab.items() if type(number) is not int), None)
    if wrong is not None:
        raise DataError(
            f"The vocabulary {path} gives {wrong!r} the id {vocab[wrong]!r}: ids are whole numbers."
        )
    return vocab


def load_merges(path: Path) -> list[tuple[str, str]]:
    """GPT-2's merges.txt: two pieces per line, the most frequent pair first."""
    merges: list[tuple[str, str]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(_describe_encoding(path, error)) from None
    for number, line in enumerate(lines, start=1):
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


def _describe_encoding(path: Path, error: UnicodeDecodeError) -> str:
    return f"{path} is not UTF-8 text (byte {error.start}): it is no vocabulary."
