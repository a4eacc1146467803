from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rapidformer.data import files
from rapidformer.errors import DataError

from .rig import ROWS, as_lines, load, write


@pytest.mark.parametrize("kind", ["json", "jsonl", "jsonl.gz", "csv", "tsv", "parquet", "arrow"])
def test_every_format(tmp_path: Path, kind: str) -> None:
    import datasets

    path = tmp_path / f"train.{kind}"
    table = datasets.Dataset.from_list(ROWS)
    if kind == "json":
        write(path, json.dumps(ROWS, indent=1))
    elif kind == "jsonl":
        write(path, as_lines(ROWS) + "\n")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(as_lines(ROWS).encode()))
    elif kind == "csv":
        write(path, 'text,label\na cat,0\nNA,1\n"ä, b",0\n')
    elif kind == "tsv":
        write(path, "text\tlabel\na cat\t0\nNA\t1\nä, b\t0\n")
    elif kind == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(path)
    found = load(path)
    assert list(found) == ["train"] and list(found["train"]) == ROWS


def test_text_lines_lone_quotes_and_feather(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.feather

    assert list(load(write(tmp_path / "train.txt", "one\n\ntwo\n"))["train"]) == [
        {"text": "one"},
        {"text": "two"},
    ]
    rows = load(write(tmp_path / "dev.tsv", 'text\tlabel\na " b\t0\nc\t1\n'))["validation"]
    assert rows["text"][:] == ['a " b', "c"]
    pyarrow.feather.write_feather(pyarrow.table({"text": ["a"]}), str(tmp_path / "train.arrow"))
    assert len(load(tmp_path / "train.arrow")["train"]) == 1


def test_squad_files_are_flattened(tmp_path: Path) -> None:
    question = {"id": 7, "question": "who ?", "answers": [{"text": "john", "answer_start": 0}]}
    article = {"title": "t", "paragraphs": [{"context": "john lives", "qas": [question]}]}
    path = write(tmp_path / "dev-v1.1.json", json.dumps({"version": "1", "data": [article]}))
    rows = load(path)["validation"]
    assert rows[0]["context"] == "john lives"
    assert rows[0]["answers"] == {"text": ["john"], "answer_start": [0]}


def test_large_files_go_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE_FILE_BYTES", 10)
    assert list(load(write(tmp_path / "train.jsonl", as_lines(ROWS)))["train"]) == ROWS
    table = write(tmp_path / "train.tsv", 'text\tlabel\na " b\t0\nNA\t1\n')
    assert list(load(table)["train"]) == [{"text": 'a " b', "label": 0}, {"text": "NA", "label": 1}]
    broken = write(tmp_path / "dev.jsonl", as_lines(ROWS) + '\n{"text": "x", \n')
    with pytest.raises(DataError, match=r"dev.jsonl, line 5: not valid JSON"):
        load(broken)


def test_large_tables_lose_no_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE_FILE_BYTES", 0)
    ending = write(tmp_path / "ending.csv", "text,label\na,0,\nb,1,\n")
    assert list(load(ending)["train"]) == [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    with pytest.raises(DataError, match=r"long.csv cannot be read: line 2 has 3 cells for 2"):
        load(write(tmp_path / "long.csv", "text,label\nyes, it is,0\nno, not,1\n"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", "", r"train.jsonl is empty \(0 bytes\)"),
        ("train.jsonl", "\n\n", r"train.jsonl holds no rows"),
        ("train.json", "[]", r"train.json holds no rows"),
        ("train.csv", "text,label\n", r"train.csv holds no rows"),
        ("train.csv", "\n", r"train.csv is empty"),
        (
            "train.jsonl",
            '{"text": "a"}\n{"text": "b"\n',
            r"train.jsonl, line 2: not valid JSON .*text.*b",
        ),
        ("train.json", '[{"text": "a"},\n {"text" "b"}]', r"line 2: not valid JSON \([^0-9]*\)"),
        ("train.jsonl", '{"a": 1}\n3\n', r"row 2: each row must be a JSON object .* this is 3"),
        (
            "train.jsonl",
            '{"a": 1}\n{"a": "x"}\n',
            r"row 2: the column a holds 'x' \(str\), but 1 \(int\)",
        ),
        (
            "train.csv",
            "a,b\n1,2\n1,2,3\n",
            r"train.csv is not a proper table: line 3 has 3 cells for 2 columns: commas outside",
        ),
        ("train.csv", "text,label\nyes, it is,0\nno, not,1\n", r"line 2 has 3 cells for 2 col"),
        ("train.tsv", "text\tlabel\na\tb\t1\n", r"line 2 has 3 cells for 2 columns: tabs"),
        ("train.xlsx", "x", r"train.xlsx: this file type is not supported; use .arrow, .csv"),
        ("train.parquet", "no", r"train.parquet cannot be read as parquet"),
        ("train.arrow", "no", r"train.arrow cannot be read as arrow"),
    ],
)
def test_bad_files_are_reported(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)
