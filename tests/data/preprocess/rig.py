"""Runs of `preprocess` on small corpora, with a tokenizer whose ids can be read off the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rapidformer.data.indexed import open_indexed
from rapidformer.data.preprocess import PreprocessSettings, Summary, preprocess
from rapidformer.data.tokenizers import Tokenizer, build_tokenizer


def build_numbers(size: int = 1000) -> Tokenizer:
    """Texts are the ids themselves: "5 7" gives 5 and 7."""
    return build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=size)


def write_json_lines(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON; a str or bytes goes in as it is, so that a line can be broken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else
        json.dumps(row).encode()
        for row in rows
    ]  # fmt: skip
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def run(
    folder: Path, *inputs: Path, tokenizer: Tokenizer | None = None, **settings: Any
) -> Summary:
    """Preprocess into ``folder/out_...`` in this process."""
    settings.setdefault("workers", 1)
    made = PreprocessSettings(
        inputs=tuple(map(str, inputs)), output_prefix=str(folder / "out"), **settings
    )
    return preprocess(made, tokenizer or build_numbers())


def read(folder: Path, name: str = "text_document") -> list[list[list[int]]]:
    """What was written: the sequences of each document."""
    data = open_indexed(folder / f"out_{name}")
    starts = data.doc_idx
    return [
        [data[i].tolist() for i in range(starts[n], starts[n + 1])]
        for n in range(len(starts) - 1)
    ]  # fmt: skip


def read_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
