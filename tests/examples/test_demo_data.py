"""The demo's data: made twice alike, balanced, apart between splits, and true."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "demo" / "build_data.py"
LIMIT = 60


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_build_data", SOURCE)
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
    assert {"corpus.jsonl", "train.jsonl", "config.json"} <= {path.name for path in files}
    for path in files:
        assert (folder / path).read_bytes() == (tmp_path / path).read_bytes(), path


def test_another_seed_gives_other_pairs(demo: ModuleType, functions: list[Any], splits) -> None:
    assert demo.build_splits(functions, seed=1)["train"] != splits["train"]


def test_labels_are_balanced(splits) -> None:
    for split, rows in splits.items():
        counts = Counter(row["label"] for row in rows)
        assert counts[0] == counts[1] > 0, split


def test_one_sentence_alone_tells_nothing(splits) -> None:
    """Each function, and nearly each docstring, is as often in a true pair as in a false one."""
    for rows in splits.values():
        by_function: Counter[str] = Counter()
        by_text: Counter[str] = Counter()
        for row in rows:
            sign = 1 if row["label"] else -1
            by_function[row["function"]] += sign
            by_text[row["belongs_to"]] += sign
        assert not any(by_function.values())
        assert sum(map(abs, by_text.values())) <= 0.1 * len(rows)


def test_no_module_or_text_is_in_two_splits(demo: ModuleType, functions: list[Any], splits) -> None:
    modules = {
        split: {row[key].split(":")[0] for row in rows for key in ("function", "belongs_to")}
        for split, rows in splits.items()
    }
    docstrings = {split: set() for split in splits}
    for function in functions:
        if function.docstring:
            docstrings[demo.get_split(function.module)].add(function.docstring.lower())
    for found in (modules, docstrings):
        assert all(found.values())
        assert sum(map(len, found.values())) == len(set().union(*found.values()))


def test_labels_are_true(functions: list[Any], splits) -> None:
    """A pair's text stands in the function that it is said to belong to, and label 1 = same."""
    docstrings: dict[str, list[str]] = {}
    for function in functions:
        docstrings.setdefault(function.label_name, []).append(function.docstring)
    for row in splits["validation"] + splits["test"]:
        assert any(text.startswith(row["sentence2"]) for text in docstrings[row["belongs_to"]])
    for rows in splits.values():
        for row in rows:
            same_name = row["function"].split(":")[1] == row["belongs_to"].split(":")[1]
            assert row["label"] == int(row["function"] == row["belongs_to"])
            assert same_name == bool(row["label"])


def test_sentence1_holds_no_docstring(functions: list[Any]) -> None:
    for function in functions:
        if function.docstring:
            assert function.docstring not in " ".join(function.body)


def test_corpus_leaves_the_other_splits_out(demo: ModuleType, functions: list[Any]) -> None:
    texts = set(demo.build_corpus(functions))
    for function in functions:
        if function.docstring:
            assert (function.docstring in texts) == (demo.get_split(function.module) == "train")


def test_model_folder_is_one_of_transformers(demo: ModuleType, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    pair = tokenizer("getURL(max_len)", "Get the URL.")
    assert set(pair) == {"input_ids", "attention_mask"}
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    first, second = tokens[1 : tokens.index("[SEP]")], tokens[tokens.index("[SEP]") + 1 : -1]
    assert first[0] == second[0] == "get"
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"

    config = AutoConfig.from_pretrained(folder / "model")
    assert config.vocab_size == len(tokenizer)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    settings = json.loads((folder / "model" / "config.json").read_text())
    assert demo.count_parameters(settings) == sum(p.numel() for p in model.parameters())
