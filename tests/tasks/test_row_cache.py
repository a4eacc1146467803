"""Tokenised rows are kept by the content of their file, and believed only when whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rapidformer.data.files import load_file
from rapidformer.tasks.rows import rows as rows_module
from rapidformer.tasks.rows.rows import map_rows
from tests.data.rig import as_lines, write

calls: list[int] = []


def encode(columns: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
    calls.append(len(numbers))
    return {"input_ids": [[len(text), number] for text, number in zip(columns["text"], numbers)]}  # noqa: B905


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rows_module, "_CACHED_ROWS", 1)
    calls.clear()
    return tmp_path / "cache" / "rapidformer" / "tokenized"


def prepare(path: Path, *key: Any) -> list[Any]:
    features = map_rows(load_file(path, None), encode, workers=None, key=key)
    return [row["input_ids"] for row in features]


def test_reused_by_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "a.jsonl", as_lines([{"text": "abc"}, {"text": "de"}]))
    before = file.stat()
    assert prepare(file) == [[3, 0], [2, 1]] and calls == [2]
    os.utime(file, (1, 1))
    caplog.set_level("INFO", "rapidformer")
    assert prepare(file) == [[3, 0], [2, 1]] and calls == [2]
    assert "2 prepared rows from" in caplog.text and "tokenized" in caplog.text
    # Another content of the same size and date.
    write(file, as_lines([{"text": "abcd"}, {"text": "e"}]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and file.stat().st_mtime == before.st_mtime
    assert prepare(file) == [[4, 0], [1, 1]] and calls == [2, 2]
    # Other settings, and a part of the rows.
    prepare(file, "another tokenizer")
    assert calls == [2, 2, 2]
    part = load_file(file, None).select([1])
    assert list(map_rows(part, encode, workers=None, key=())["input_ids"]) == [[1, 0]]


@pytest.mark.parametrize("kind", ["parquet", "large"])
def test_files_that_datasets_reads(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas

    monkeypatch.setattr("rapidformer.data.files.LARGE_FILE_BYTES", 0)
    file = tmp_path / ("a.parquet" if kind == "parquet" else "a.jsonl")

    def store(text: str) -> None:
        if kind == "parquet":
            pandas.DataFrame({"text": [text]}).to_parquet(file)
        else:
            write(file, as_lines([{"text": text}]))
        os.utime(file, (1, 1))

    def load() -> list[Any]:
        table = load_file(file, str(tmp_path / "c"))
        return [r["input_ids"] for r in map_rows(table, encode, workers=None, key=())]

    store("abc")
    assert load() == [[3, 0]] and calls == [1]
    os.utime(file, (2, 2))
    assert load() == [[3, 0]] and calls == [1]
    store("xyz")
    load()
    assert calls == [1, 1]


@pytest.mark.parametrize("damage", ["cut", "flipped", "json"])
def test_a_damaged_cache_is_built_again(
    tmp_path: Path, cached: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "a.jsonl", as_lines([{"text": "abc"}] * 50))
    whole = prepare(file)
    (arrow,), (record,) = cached.glob("*.arrow"), cached.glob("*.json")
    content = bytearray(arrow.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "json":
        record.write_text("{", encoding="utf-8")
    else:
        arrow.write_bytes(content[:-200] if damage == "cut" else content)
    assert prepare(file) == whole and len(calls) == 2
    assert "is built again" in caplog.text
    assert prepare(file) == whole and len(calls) == 2
    assert not list(cached.glob("tmp*"))
