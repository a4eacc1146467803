from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer.data.folders import get_split_name, name_splits
from rapidformer.data.sources import load_splits
from rapidformer.errors import DataError

from .rig import ROWS, as_lines, load, make_args, write


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


def test_one_path_or_a_list_of_them(tmp_path: Path) -> None:
    train = write(tmp_path / "data" / "train.jsonl", as_lines(ROWS))
    test = write(tmp_path / "data" / "test.jsonl", as_lines(ROWS[:1]))
    for one in (str(train), [str(train)], train):
        assert {k: len(v) for k, v in load_splits(make_args(data_path=one)).items()} == {"train": 3}
    both = {"train": 3, "test": 1}
    for several in (str(train.parent), [str(train.parent)], [str(train), str(test)]):
        found = load_splits(make_args(data_path=several))
        assert {name: len(rows) for name, rows in found.items()} == both
    assert len(load_splits(make_args(train_data=str(train)))["train"]) == 3
    with pytest.raises(DataError, match=r"data and other paths: give one folder, or several"):
        load_splits(make_args(data_path=[str(train.parent), str(test)]))


def test_split_folders(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train" / "part1.jsonl", as_lines(ROWS))
    write(tmp_path / "d" / "train" / "part2.jsonl", as_lines(ROWS))
    write(tmp_path / "d" / "validation" / "part1.jsonl", as_lines(ROWS))
    assert {k: len(v) for k, v in load(tmp_path / "d").items()} == {"train": 6, "validation": 3}


def test_split_folders_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "d" / "train")
    table.select(range(2)).save_to_disk(tmp_path / "d" / "dev")
    assert {k: len(v) for k, v in load(tmp_path / "d").items()} == {"train": 3, "validation": 2}


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


def test_missing_paths_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", as_lines(ROWS))
    with pytest.raises(DataError, match=r"trian.jsonl: no such .* mean .*train.jsonl\?"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder \(nor a folder"):
        load(tmp_path / "no" / "where.csv")
    with pytest.raises(DataError, match=r"--valid-data no.csv: no such"):
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


def test_hub_name_without_network_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s before it tries again")

    monkeypatch.setattr("time.sleep", refuse)
    message = r"The data set glue \(mrpc\) is neither a local file .* cannot be reached"
    with pytest.raises(DataError, match=message):
        load_splits(make_args(data_path=["glue"], data_name="mrpc", cache_dir=str(tmp_path)))
    with pytest.raises(DataError, match=message):
        load_splits(make_args(data_path="glue", data_name="mrpc", cache_dir=str(tmp_path)))
