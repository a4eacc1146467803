from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.errors import DataError
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

TASK = get_task("token_classification")
ROWS: list[dict[str, Any]] = [
    {"tokens": ["John", "lives", "in", "Paris"], "ner_tags": ["B-PER", "O", "O", "B-LOC"]},
    {"tokens": ["Mary", "eats"], "ner_tags": ["B-PER", "O"]},
    {"tokens": ["the", "red", "London", "Berlin"], "ner_tags": ["O", "O", "B-LOC", "I-LOC"]},
    # A word of several tokens.
    {"tokens": ["xyzzy", "sat", "."], "ner_tags": ["B-PER", "O", "O"]},
]


def test_trains_evaluates_and_predicts(bert_folder: Path, tmp_path: Path) -> None:
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    write_jsonl(tmp_path / "train.json", ROWS)
    write_jsonl(tmp_path / "valid.json", ROWS)
    args = make_args(pretrained_model_name_or_path=bert_folder, data_path=tmp_path)
    prepared = TASK.prepare(args)
    assert prepared.extras["names"] == ("B-LOC", "B-PER", "I-LOC", "O")
    model = TASK.build_model(args, prepared)
    losses = train_steps(TASK, model, prepared, steps=8)
    assert losses[-1] < losses[0]

    records = run_split(TASK, model, prepared, "validation")
    metrics = compute_metrics(TASK, records, prepared, "validation")
    rows = TASK.predictions(records, prepared, "validation")
    truth = [row["ner_tags"] for row in ROWS]
    assert [row["expected"] for row in rows] == truth
    assert [row["words"] for row in rows] == [row["tokens"] for row in ROWS]
    guess = [row["tags"] for row in rows]
    assert metrics["f1"] == pytest.approx(f1_score(truth, guess))
    assert metrics["precision"] == pytest.approx(precision_score(truth, guess, zero_division=0))
    assert metrics["recall"] == pytest.approx(recall_score(truth, guess))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    batch = prepared.collate([prepared.validation[i] for i in range(4)])
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)


def test_only_the_first_piece_of_a_word_has_a_tag(bert_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder)
    prepared = TASK.prepare(args, {"train": ROWS, "validation": ROWS})
    per, other = 1, 3
    assert prepared.train[3]["labels"] == [-100, per, *[-100] * 4, other, other, -100]
    every = make_args(pretrained_model_name_or_path=bert_folder, label_all_tokens=True)
    prepared = TASK.prepare(every, {"train": ROWS, "validation": ROWS})
    assert prepared.train[3]["labels"] == [-100, *[per] * 5, other, other, -100]
    assert prepared.validation[3]["labels"] == [-100, per, *[-100] * 4, other, other, -100]


def test_numbers_with_declared_names(bert_folder: Path) -> None:
    import datasets

    names = ["O", "B-PER", "B-LOC", "I-LOC"]
    rows = [{**r, "ner_tags": [names.index(t) for t in r["ner_tags"]]} for r in ROWS]
    label = datasets.ClassLabel(names=names)
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(label)}
    )
    data = datasets.Dataset.from_list(rows, features=features)
    prepared = TASK.prepare(make_args(pretrained_model_name_or_path=bert_folder), {"train": data})
    assert prepared.model_settings["id2label"] == dict(enumerate(names))
    assert prepared.train[0]["labels"] == [-100, 1, 0, 0, 2, -100]


def test_tags_that_mark_no_entities(bert_folder: Path) -> None:
    rows = [{"words": ["the", "cat", "sat"], "tags": ["DET", "NOUN", "VERB"]}] * 2
    args = make_args(pretrained_model_name_or_path=bert_folder)
    prepared = TASK.prepare(args, {"train": rows, "validation": rows})
    model = TASK.build_model(args, prepared)
    metrics = compute_metrics(
        TASK, run_split(TASK, model, prepared, "validation"), prepared, "validation"
    )
    assert set(metrics) == {"loss", "accuracy", "f1"}


def test_prediction_from_a_saved_model(bert_folder: Path, tmp_path: Path) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder)
    prepared = TASK.prepare(args, {"train": ROWS})
    TASK.build_model(args, prepared).save_pretrained(tmp_path)
    prepared.processor.save_pretrained(tmp_path)
    saved = make_args(load=tmp_path, seq_length=6)
    ready = TASK.prepare_for_prediction(saved, ["John lives in red London", "Mary"])
    found = TASK.predictions(
        run_split(TASK, TASK.build_model(saved, ready), ready, "test"), ready, "test"
    )
    assert found[0]["words"] == ["John", "lives", "in", "red"] and found[0]["words_not_seen"] == 1
    assert set(found[1]["tags"]) <= {"B-LOC", "B-PER", "I-LOC", "O"} and "expected" not in found[1]


def test_rows_without_words_are_left_out_of_training(bert_folder: Path) -> None:
    rows = [*ROWS, {"tokens": [], "ner_tags": []}]
    args = make_args(pretrained_model_name_or_path=bert_folder)
    prepared = TASK.prepare(args, {"train": rows, "validation": rows})
    assert len(prepared.train) == 4 and len(prepared.validation) == 5
    model = TASK.build_model(args, prepared)
    records = run_split(TASK, model, prepared, "validation", batch_size=1)
    assert records[4]["count"] == 0 and records[4]["loss"] == 0.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"tokens": ["a", "b"], "ner_tags": ["O"]}],
            r"train, row 1: 2 words in tokens but 1 tags",
        ),
        (
            [{"tokens": ["a"], "tegs": ["O"]}],
            r"one tag per word.*tokens, tegs.*--label-column tegs",
        ),
        (
            [*ROWS, {"tokens": ["a"], "ner_tags": None}],
            r"train, row 5: the column ner_tags has no label",
        ),
    ],
)
def test_bad_data_is_reported(bert_folder: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TASK.prepare(make_args(pretrained_model_name_or_path=bert_folder), {"train": rows})


def test_unknown_tag_in_validation_is_named_by_its_row(bert_folder: Path) -> None:
    splits = {"train": ROWS, "validation": [ROWS[0], {"tokens": ["a"], "ner_tags": ["B-ORG"]}]}
    with pytest.raises(DataError, match=r"validation, row 2: the label 'B-ORG'.*B-LOC, B-PER"):
        TASK.prepare(make_args(pretrained_model_name_or_path=bert_folder), splits)
