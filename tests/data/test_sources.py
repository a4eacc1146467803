from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapidformer.data import sources
from rapidformer.data.sources import get_split_name, load_prediction_rows, load_splits, name_splits
from rapidformer.errors import DataError

ROWS = [{"text": "a cat", "label": 0}, {"text": "NA", "label": 1}, {"text": "ä, b", "label": 0}]


def make_args(**values: Any) -> SimpleNamespace:
    defaults = {
        "data_path": None,
        "data_name": None,
        "data_dir": None,
        "train_data": None,
        "valid_data": None,
        "test_data": None,
        "cache_dir": None,
        "max_predict_samples": None,
    }
    return SimpleNamespace(**{**defaults, **values})


def load(path: Path, **values: Any) -> dict[str, Any]:
    return load_splits(make_args(data_path=[str(path)], cache_dir=str(path.parent / "c"), **values))


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_folder_of_jsonl_is_split_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "train.jsonl", as_lines(ROWS))
    write(folder / "dev.jsonl", as_lines(ROWS[:2]))
    write(folder / "my_test.jsonl", as_lines(ROWS[:1]))
    write(folder / "README.md", "words")
    found = load(folder)
    assert {name: len(rows) for name, rows in found.items()} == {
        "train": 3,
        "validation": 2,
        "test": 1,
    }
    assert list(found["train"]) == ROWS


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


def test_save_to_disk(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    assert len(load(tmp_path / "one")["train"]) == 3
    both = datasets.DatasetDict({"train": table, "validation_matched": table, "extra": table})
    both.save_to_disk(tmp_path / "two")
    assert set(load(tmp_path / "two")) == {"train", "validation"}


def test_explicit_files_and_sub_folder(tmp_path: Path) -> None:
    one = write(tmp_path / "x.jsonl", as_lines(ROWS))
    two = write(tmp_path / "y.jsonl", as_lines(ROWS))
    found = load_splits(make_args(train_data=[str(one), str(two)], valid_data=[str(two)]))
    assert len(found["train"]) == 6 and len(found["validation"]) == 3
    write(tmp_path / "glue" / "mrpc" / "train.jsonl", as_lines(ROWS))
    write(tmp_path / "glue" / "cola" / "train.jsonl", as_lines(ROWS[:1]))
    assert len(load(tmp_path / "glue", data_name="mrpc")["train"]) == 3
    with pytest.raises(DataError, match=r"--data-name mprc: .* it has cola, mrpc"):
        load(tmp_path / "glue", data_name="mprc")
    by_dir = load_splits(make_args(data_dir=str(tmp_path / "glue"), data_name="cola"))
    assert len(by_dir["train"]) == 1


def test_split_folders(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train" / "part1.jsonl", as_lines(ROWS))
    write(tmp_path / "d" / "train" / "part2.jsonl", as_lines(ROWS))
    write(tmp_path / "d" / "validation" / "part1.jsonl", as_lines(ROWS))
    assert {k: len(v) for k, v in load(tmp_path / "d").items()} == {"train": 6, "validation": 3}


def test_split_names() -> None:
    names = {
        "train-00000-of-00001": "train",
        "validation_matched": "validation",
        "dev": "validation",
        "validation_mismatched": None,
        "my_eval_set": "validation",
        "predict": "test",
        "contest": None,
        "latest": None,
    }
    assert {name: get_split_name(name) for name in names} == names
    with pytest.raises(DataError, match=r"the splits a, b: none of them is named train"):
        name_splits({"a": ROWS, "b": ROWS}, "x")


def test_prediction_rows_from_a_file_of_any_name(tmp_path: Path) -> None:
    path = write(tmp_path / "questions.jsonl", as_lines(ROWS))
    rows = load_prediction_rows(make_args(data_path=str(path), max_predict_samples=2))
    assert rows == ROWS[:2]


def test_large_files_go_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGE_FILE_BYTES", 10)
    assert list(load(write(tmp_path / "train.jsonl", as_lines(ROWS)))["train"]) == ROWS
    broken = write(tmp_path / "dev.jsonl", as_lines(ROWS) + '{"text": "x", \n')
    with pytest.raises(DataError, match=r"dev.jsonl, line 4: not valid JSON"):
        load(broken)


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
        ("train.json", '[{"text": "a"},\n {"text" "b"}]', r"train.json, line 2: not valid JSON"),
        ("train.jsonl", '{"a": 1}\n3\n', r"row 2: each row must be a JSON object .* this is 3"),
        (
            "train.jsonl",
            '{"a": 1}\n{"a": "x"}\n',
            r"row 2: the column a holds 'x' \(str\), but 1 \(int\)",
        ),
        ("train.csv", "a,b\n1,2\n1,2,3\n", r"train.csv is not a proper table: .*line 3"),
        ("train.xlsx", "x", r"train.xlsx: this kind of file cannot be read; use .arrow, .csv"),
        ("train.parquet", "no", r"train.parquet cannot be read as parquet"),
        ("train.arrow", "no", r"train.arrow cannot be read as arrow"),
    ],
)
def test_bad_files_are_told(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


def test_missing_paths_are_told(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", as_lines(ROWS))
    with pytest.raises(DataError, match=r"trian.jsonl: there is no such .* mean .*train.jsonl\?"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"there is no such file or folder \(nor a folder"):
        load(tmp_path / "no" / "where.csv")
    with pytest.raises(DataError, match=r"--valid-data no.csv: there is no such"):
        load_splits(make_args(valid_data=["no.csv"]))
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match=r"holds no data files: .* it holds nothing"):
        load(tmp_path / "bare")
    with pytest.raises(DataError, match=r"No data was given: point --data-path"):
        load_splits(make_args())
    with pytest.raises(
        DataError, match=r"do not hold the same columns: z.jsonl: a .list<.*; w.jsonl: a .string"
    ):
        write(tmp_path / "z.jsonl", '{"a": [1]}\n{"a": [2]}\n')
        write(tmp_path / "w.jsonl", '{"a": "x"}\n')
        load_splits(make_args(train_data=[str(tmp_path / "z.jsonl"), str(tmp_path / "w.jsonl")]))


def test_hub_name_without_network_fails_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    message = r"The data set glue \(mrpc\) is neither a file .* cannot be reached"
    with pytest.raises(DataError, match=message):
        args = make_args(data_path=["glue"], data_name="mrpc", cache_dir=str(tmp_path))
        load_splits(args)
    assert time.monotonic() - started < 10


def test_unreachable_hub_is_found_out_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:9")
    sources._is_hub_reachable.cache_clear()
    assert sources._is_hub_reachable() is False
    sources._is_hub_reachable.cache_clear()
