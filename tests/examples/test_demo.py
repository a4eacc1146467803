"""The demo: its data is made twice alike, apart between splits, and does not tell the answer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
LIMIT = 20


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_build_data", DEMO / "build_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def functions(demo: ModuleType) -> list[Any]:
    return demo.read_functions(limit=LIMIT)


@pytest.fixture(scope="module")
def splits(demo: ModuleType, functions: list[Any]) -> dict[str, list[dict[str, Any]]]:
    return demo.build_splits(functions)


@pytest.fixture(scope="module")
def folder(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo")
    demo.build_demo(output, limit=LIMIT)
    return output


def test_twice_the_same(demo: ModuleType, folder: Path, tmp_path: Path) -> None:
    demo.build_demo(tmp_path, limit=LIMIT)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert {"test.jsonl", "train.jsonl", "config.json"} <= {path.name for path in files}
    for path in files:
        assert (folder / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_another_seed_gives_another_order(demo: ModuleType, functions: list[Any], splits) -> None:
    assert demo.build_splits(functions, seed=1)["train"] != splits["train"]


def test_every_topic_is_in_every_split(demo: ModuleType) -> None:
    for split, rows in demo.build_splits(demo.read_functions()).items():
        counts = {topic: sum(row["label"] == topic for row in rows) for topic in demo.TOPICS}
        assert min(counts.values()) >= 20, (split, counts)


def test_no_function_is_in_two_splits(splits) -> None:
    for key in ("function", "text"):
        values = {split: {row[key] for row in rows} for split, rows in splits.items()}
        assert all(values.values())
        assert sum(map(len, values.values())) == len(set().union(*values.values())), key


def test_labels_are_true(demo: ModuleType, splits) -> None:
    for rows in splits.values():
        for row in rows:
            module = row["function"].partition(":")[0].partition("/")[0].removesuffix(".py")
            assert module in demo.TOPICS[row["label"]]


def test_the_text_names_no_module_and_no_topic(demo: ModuleType, splits) -> None:
    for rows in splits.values():
        for row in rows:
            assert not demo.HIDDEN.search(row["text"])
    assert demo.HIDDEN.search("import email.message")


def test_held_out_rows_are_whole_functions(functions: list[Any], splits) -> None:
    whole = {function.build_row()["text"] for function in functions}
    assert {row["text"] for row in splits["validation"] + splits["test"]} <= whole
    assert not {row["text"] for row in splits["train"]} <= whole


def test_model_folder_is_one_of_transformers(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    encoded = tokenizer("getMessage(self)")
    assert set(encoded) == {"input_ids", "attention_mask"}
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert tokens == ["[CLS]", "get", "message", "self", "[SEP]"]

    config = AutoConfig.from_pretrained(folder / "model")
    assert config.vocab_size == len(tokenizer)
    with torch.device("meta"):
        AutoModelForSequenceClassification.from_config(config)


def test_it_trains_evaluates_predicts_and_draws(python: Path, tmp_path: Path) -> None:
    output = tmp_path / "demo"
    call = [python, DEMO / "run.py", "--quick", "--output", output]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout and "Where to go from here" in done.stdout
    assert all((output / name).stat().st_size > 10_000 for name in ("curve.png", "confusion.png"))
    metrics = json.loads((output / "evaluation.json").read_text())
    assert sum(map(sum, metrics["confusion_matrix"]["counts"])) == metrics["examples"]


def test_a_folder_of_somebody_else_is_left_alone(python: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("keep me")
    call = [python, DEMO / "run.py", "--quick", "--output", tmp_path]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode != 0 and "choose another folder with --output" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.txt"]
