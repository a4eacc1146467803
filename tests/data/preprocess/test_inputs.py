"""What is read: files, folders and patterns, packed or not, JSON, text and tables."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer.data.preprocess.inputs import find_sources
from rapidformer.data.preprocess.reading import read_parts
from rapidformer.errors import ConfigurationError, DataError, RapidformerError
from tests.data.preprocess.rig import read, run, write_json_lines

ROWS = [{"text": f"{i} {i + 1}"} for i in range(40)]
EXPECTED = [[[i, i + 1]] for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_zstd(path: Path, content: bytes) -> None:
    import zstandard

    # Two frames, as `cat a.zst b.zst` makes them.
    compressor = zstandard.ZstdCompressor()
    half = len(content) // 2
    path.write_bytes(compressor.compress(content[:half]) + compressor.compress(content[half:]))


def write_parquet(path: Path, columns: dict[str, list[Any]], group: int = 7) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)


@pytest.mark.parametrize("part_bytes", [100, 1 << 20])
@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "array", "array.gz", "bom"])
def test_every_kind_of_file_gives_the_same_documents(
    kind: str, part_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / f"in.{kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress(LINES))
    elif kind == "zst":
        write_zstd(path, LINES)
    elif kind == "parquet":
        write_parquet(path, {"other": list(range(40)), "text": [row["text"] for row in ROWS]})
    elif kind.startswith("array"):
        content = json.dumps(ROWS, indent=1).encode()
        path = tmp_path / f"in.{kind.replace('array', 'json')}"
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    else:
        path.write_bytes((b"\xef\xbb\xbf" if kind == "bom" else b"") + LINES)
    summary = run(tmp_path, path, part_bytes=part_bytes)
    assert read(tmp_path) == EXPECTED
    assert (summary.parts == 1) == (part_bytes > 100)


def test_compression_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(gzip.compress(LINES))
    run(tmp_path, path)
    assert read(tmp_path) == EXPECTED


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_file_that_was_cut_off_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"in.jsonl.{kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress(LINES * 300)[:-20])
    else:
        write_zstd(path, LINES * 300)
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RapidformerError, match="damaged and cannot be unpacked to its end"):
        run(tmp_path, path, part_bytes=10_000)
    assert not list(tmp_path.glob("out*.bin"))


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zstd(tmp_path / "in.jsonl.zst", LINES)
    for name in ("zstandard", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RapidformerError, match=r"pip install 'rapidformer\[zstd\]'"):
        run(tmp_path, tmp_path / "in.jsonl.zst")


def test_order_of_documents_is_the_order_of_the_input(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl", "deep/er/c.json", "ignored.csv", ".hidden.jsonl"]
    for number, name in enumerate(names):
        write_json_lines(tmp_path / "in" / name, [{"text": str(number)}])
    run(tmp_path / "given", tmp_path / "in/b.jsonl", tmp_path / "in/a.jsonl")
    assert read(tmp_path / "given") == [[[0]], [[1]]]
    run(tmp_path / "folder", tmp_path / "in")
    assert read(tmp_path / "folder") == [[[1]], [[0]], [[2]]]
    run(tmp_path / "pattern", tmp_path / "in/**/*.json*")
    assert read(tmp_path / "pattern") == [[[1]], [[0]], [[2]]]


def test_a_file_given_twice_is_read_twice_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    with caplog.at_level("WARNING", logger="rapidformer"):
        find_sources((str(path), str(path)))
    assert "is given 2 times" in caplog.text


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("file", [[[1, 2, 3, 4, 5, 6]], [[7]]]),
        ("lines", [[[1, 2]], [[3]], [[4, 5]], [[6]], [[7]]]),
        ("blank-line", [[[1, 2, 3]], [[4, 5, 6]], [[7]]]),
    ],
)
@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_plain_text_has_three_kinds_of_documents(
    how: str, expected: list[Any], part_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n1 2\r\n3\r\n \r\n\n4 5\n6\n\n")
    (tmp_path / "b.txt").write_bytes(b"7")
    run(
        tmp_path, tmp_path / "a.txt", tmp_path / "b.txt",
        text_documents=how, part_bytes=part_bytes,
    )  # fmt: skip
    assert read(tmp_path) == expected


def test_other_names_are_recognised_by_content(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("5 6")
    (tmp_path / "lines").write_bytes(LINES)
    (tmp_path / "binary").write_bytes(b"\x89PNG\x00\x01")
    run(tmp_path, tmp_path / "script.py", tmp_path / "lines")
    assert read(tmp_path) == [[[5, 6]], *EXPECTED]
    with pytest.raises(ConfigurationError, match="neither JSON lines nor UTF-8 text nor Parquet"):
        run(tmp_path, tmp_path / "binary")


def test_missing_inputs_are_reported_at_once(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "corpus.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError) as caught:
        run(tmp_path, tmp_path / "corpus.json", tmp_path / "*.gz", tmp_path / "empty")
    assert len(caught.value.problems) == 3
    assert "Did you mean" in caught.value.problems[0]
    assert "no file matches this pattern" in caught.value.problems[1]
    assert "the folder holds no file with a name such as" in caught.value.problems[2]


def test_a_table_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", {"content": ["1"], "id": [5]})
    with pytest.raises(DataError, match="has no column text: it has content, id"):
        run(tmp_path, tmp_path / "in.parquet")


def test_rows_that_are_not_text_are_counted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["1", None, "2"]})
    summary = run(tmp_path, tmp_path / "in.parquet")
    assert read(tmp_path) == [[[1]], [[2]]]
    assert summary.problems["'text' is not a string"].first[0][:2] == (0, 2)


def test_a_list_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"in.json: not valid JSON \(it is nested too deeply\)"):
        run(tmp_path, tmp_path / "in.json")


def test_a_list_that_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('[\n{"text": "1"},\n{"text": }]')
    with pytest.raises(DataError, match=r"in.json, line 3: the file begins like a JSON list"):
        run(tmp_path, tmp_path / "in.json")


def test_plain_text_has_one_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(ConfigurationError, match=r"names 2 keys, but .*a.txt is plain text"):
        run(tmp_path, tmp_path / "a.txt", json_keys=("text", "title"))
    run(tmp_path, tmp_path / "a.txt", json_keys=("body",))
    assert read(tmp_path, "body_document") == [[[1]]]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "json", "txt"])
@pytest.mark.parametrize("count", [1, 7, 8, 40, 99])
def test_only_the_first_documents_are_read(kind: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        write_parquet(path, {"text": [row["text"] for row in ROWS]})
    elif kind == "txt":
        path.write_text("".join(row["text"] + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_bytes(gzip.compress(LINES) if kind.endswith("gz") else LINES)
    run(tmp_path, path, max_documents=count, part_bytes=150, text_documents="lines")
    assert read(tmp_path) == EXPECTED[:count]


@pytest.mark.parametrize(
    "kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "json", "paragraphs"]
)
def test_a_reader_that_starts_in_the_middle_cuts_the_same_parts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        write_parquet(path, {"text": [row["text"] for row in ROWS]})
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "paragraphs":
        path.write_text("".join(f"{i}\n{i}\n\n\n" for i in range(40)))
    elif kind.endswith("zst"):
        write_zstd(path, LINES)
    else:
        path.write_bytes(gzip.compress(LINES) if kind.endswith("gz") else LINES)
    other = write_json_lines(tmp_path / "other.jsonl", ROWS[:5])
    sources = find_sources((str(other), str(path), str(other)))
    options: dict[str, Any] = {
        "keys": ("text",), "text_documents": "blank-line", "part_bytes": 30, "max_documents": 45,
    }  # fmt: skip
    parts = list(read_parts(sources, **options))
    assert len(parts) > 8
    assert parts[-1].end.documents == 45
    for number in range(1, len(parts)):
        rest = read_parts(sources, start=parts[number - 1].end, number=number, **options)
        assert list(rest) == parts[number:]
