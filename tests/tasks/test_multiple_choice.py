from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.errors import DataError
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

TASK = get_task("multiple_choice")
SWAG: list[dict[str, Any]] = [
    {
        "sent1": "the cat sat .",
        "sent2": "the dog",
        "ending0": "runs",
        "ending1": "eats a book and a film",
        "label": 0,
    },
    {
        "sent1": "mary is happy",
        "sent2": "mary",
        "ending0": "sleeps",
        "ending1": "is not sad",
        "label": 1,
    },
    {
        "sent1": "john lives in paris",
        "sent2": "john",
        "ending0": "eats",
        "ending1": "lives",
        "label": 1,
    },
]


def test_trains_evaluates_and_predicts(bert_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", SWAG)
    write_jsonl(tmp_path / "validation.jsonl", SWAG)
    args = make_args(pretrained_model_name_or_path=bert_folder, data_path=tmp_path)
    prepared = TASK.prepare(args)
    row = prepared.train[0]
    assert prepared.processor.decode(row["input_ids"][1]).startswith(
        "[CLS] the cat sat. [SEP] the dog eats"
    )
    batch = prepared.collate([prepared.train[i] for i in range(3)])
    assert batch["input_ids"].shape[:2] == (3, 2)
    torch.manual_seed(1)  # of the new head
    model = TASK.build_model(args, prepared)
    losses = train_steps(TASK, model, prepared, steps=24)
    assert losses[-1] < losses[0]
    records = run_split(TASK, model, prepared, "validation", batch_size=2)
    metrics = compute_metrics(TASK, records, prepared, "validation")
    with torch.no_grad():
        whole = model(**batch)
    assert metrics["loss"] == pytest.approx(float(whole.loss), rel=1e-5)
    hits = float((whole.logits.argmax(-1) == batch["labels"]).float().mean())
    assert metrics["accuracy"] == pytest.approx(hits)
    rows = TASK.predictions(records, prepared, "validation")
    assert rows[0]["expected"] == 0 and rows[0]["text"] in {"runs", "eats a book and a film"}


@pytest.mark.parametrize(
    ("row", "label", "first"),
    [
        (
            {
                "question": "who ?",
                "choices": {"label": ["A", "B"], "text": ["cat", "dog"]},
                "answerKey": "B",
            },
            1,
            "who? [SEP] cat",
        ),
        (
            {"article": "the cat", "question": "who ?", "options": ["cat", "dog"], "answer": "A"},
            0,
            "the cat [SEP] who? cat",
        ),
        ({"ctx": "the cat", "endings": ["sat", "runs"], "label": "1"}, 1, "the cat [SEP] sat"),
        (
            {"premise": "the cat", "choice1": "sat", "choice2": "runs", "label": 1},
            1,
            "the cat [SEP] sat",
        ),
        ({"goal": "eat", "sol1": "a", "sol2": "the", "label": 0}, 0, "eat [SEP] a"),
        ({"question": "who ?", "choices": ["cat", "dog"], "answer": "dog"}, 1, "who? [SEP] cat"),
    ],
)
def test_usual_shapes(bert_folder: Path, row: dict[str, Any], label: int, first: str) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder)
    prepared = TASK.prepare(args, {"train": [row]})
    assert prepared.train[0]["labels"] == label
    decoded = prepared.processor.decode(prepared.train[0]["input_ids"][0])
    assert first.replace(" ", "") in decoded.replace(" ", "")


def test_prediction(bert_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder)
    rows = [{k: v for k, v in row.items() if k != "label"} for row in SWAG]
    ready = TASK.prepare_for_prediction(args, rows)
    model = TASK.build_model(args, ready)
    found = TASK.predictions(run_split(TASK, model, ready, "test"), ready, "test")
    assert len(found) == 3 and "expected" not in found[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"sent1": "a", "label": 0}], r"the choices.*sent1, label.*--choice-columns"),
        (
            [{**SWAG[0], "label": 2}],
            r"train, row 1: the label 2 .* none of the 2 choices: .* 0 to 1",
        ),
        ([{**SWAG[0], "label": None}], r"train, row 1: the label None"),
        (
            [
                {"ctx": "a", "endings": ["x", "y"], "label": 0},
                {"ctx": "a", "endings": ["x", "y", "z"], "label": 0},
            ],
            r"train, row 2: 3 choices, but the first row has 2",
        ),
        ([{"ctx": "a", "endings": "x", "label": 0}], r"row 1: the column endings must hold a list"),
    ],
)
def test_bad_data_is_reported(bert_folder: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TASK.prepare(make_args(pretrained_model_name_or_path=bert_folder), {"train": rows})
