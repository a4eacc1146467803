"""Evaluating a fine-tuned folder: one split is enough, and the model's own classes hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.tasks.evaluation.evaluating import evaluate_task
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.text import text as text_parts

from .conftest import make_args, train_steps, write_jsonl

TASK = get_task("sequence_classification")
TEXTS = {
    "bad": ["bad movie", "awful film", "not good"],
    "fine": ["a fine book", "fine film", "the movie is fine"],
    "good": ["good movie", "a great film", "great book"],
}
ROWS = [{"text": text, "label": label} for label, texts in TEXTS.items() for text in texts]
TEST = [row for row in ROWS if row["label"] != "bad"]


def finetune(base: Path, folder: Path, rows: list[dict[str, Any]], task: Any = TASK) -> Path:
    args = make_args(pretrained_model_name_or_path=base)
    prepared = task.prepare(args, {"train": rows})
    torch.manual_seed(0)
    model = task.build_model(args, prepared)
    train_steps(task, model, prepared, steps=20)
    model.save_pretrained(folder)
    prepared.processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetune(bert_folder, tmp_path_factory.mktemp("tuned"), ROWS)


@pytest.fixture
def evaluate(tuned: Path, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Evaluate on rows as a file, with the settings that a user would give."""

    def run(rows: list[dict[str, Any]], split: str = "test", **settings: Any) -> dict[str, float]:
        values = {
            "task": "sequence_classification",
            "pretrained_model_name_or_path": str(tuned),
            "data_path": str(write_jsonl(tmp_path / f"{split}.jsonl", rows)),
            "eval_split": split,
            "eval_micro_batch_size": 4,
            "log_level": "error",
        }
        engine = RapidformerEngine(args={**values, **settings})
        try:
            return evaluate_task(engine).get_numbers()
        finally:
            engine.close()

    return run


def score_by_hand(folder: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Transformers alone, by the names in the saved configuration."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    with torch.no_grad():
        output = model(**batch, labels=labels)
    hits = (output.logits.argmax(-1) == labels).float().mean()
    return {"loss": float(output.loss), "accuracy": float(hits)}


def test_a_class_may_be_absent_from_the_split(tuned: Path, evaluate: Any) -> None:
    expected = score_by_hand(tuned, TEST)
    found = evaluate(TEST)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_the_same_by_numbers_and_by_declared_names(
    tuned: Path, evaluate: Any, tmp_path: Path
) -> None:
    import datasets

    expected = score_by_hand(tuned, TEST)
    by_number = [{**row, "label": ["bad", "fine", "good"].index(row["label"])} for row in TEST]
    assert evaluate(by_number)["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    names = ["good", "fine", "bad"]
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    table = datasets.Dataset.from_list(TEST, features=features)
    table.save_to_disk(tmp_path / "test")
    found = evaluate(TEST, data_path=str(tmp_path / "test"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([*TEST, {"text": "a book", "label": "new"}], {}, r"test, row 7: the label 'new' in the "
         r"column label is unknown to the model, which was trained for bad, fine, good\."),
        ([{"text": "a book", "label": 3}], {}, r"row 1: the label 3 .* unknown to the model"),
        ([{"text": "a book", "label": 0.5}], {}, r"contain 0.5, which is not a class"),
        (TEST, {"num_labels": 2}, r"--num-labels 2 contradicts the model, which was trained for 3"),
        ([{"text": "a", "label": -1}], {}, r"No split has labels .* use `rapidformer predict`"),
        (TEST, {"eval_split": "validation"}, r"the data has no split 'validation', only test"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_be_asked_is_reported(
    evaluate: Any, rows: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(rows, **settings)


def test_undeclared_class_is_reported_by_name(tuned: Path) -> None:
    import datasets

    label = datasets.ClassLabel(names=["good", "new"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = [{"text": "a", "label": "good"}, {"text": "b", "label": "new"}]
    table = datasets.Dataset.from_list(rows, features=features)
    args = make_args(pretrained_model_name_or_path=tuned)
    assert TASK.prepare(args, {"test": table.select([0])}).test[0]["labels"] == 2
    with pytest.raises(DataError, match=r"test, row 2: the label 1 in .* \(new\) is unknown to"):
        TASK.prepare(args, {"test": table})


def test_other_splits_are_not_prepared(
    tuned: Path, evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = text_parts.map_rows

    def count(rows: Any, *values: Any, **options: Any) -> Any:
        seen.append(len(rows))
        return original(rows, *values, **options)

    monkeypatch.setattr(text_parts, "map_rows", count)
    train = write_jsonl(tmp_path / "train.jsonl", [{"text": "x", "label": "never learnt"}])
    test = write_jsonl(tmp_path / "test.jsonl", TEST)
    found = evaluate(TEST, data_path=[str(train), str(test)])
    assert seen == [len(TEST)]
    assert found["loss"] == pytest.approx(score_by_hand(tuned, TEST)["loss"], rel=1e-5)


def test_training_rows_are_evaluated_like_any_others(tuned: Path, evaluate: Any) -> None:
    expected = score_by_hand(tuned, TEST)
    assert evaluate(TEST, split="train")["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_whole_numbers_do_not_make_a_classifier_of_a_regression(
    bert_folder: Path, evaluate: Any, tmp_path: Path
) -> None:
    rows = [{"text": row["text"], "label": 0.5 * i} for i, row in enumerate(ROWS)]
    folder = finetune(bert_folder, tmp_path / "regression", rows)
    found = evaluate(
        [{"text": "good movie", "label": 2}, {"text": "bad movie", "label": 1}],
        pretrained_model_name_or_path=str(folder),
    )
    assert "mse" in found and "accuracy" not in found


def test_several_labels_a_row_keep_the_models_order(bert_folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "good movie", "labels": ["b", "c"]}, {"text": "bad film", "labels": ["a"]}]
    folder = finetune(bert_folder, tmp_path / "multi", rows)
    args = make_args(pretrained_model_name_or_path=folder)
    one = TASK.prepare(args, {"test": [{"text": "x", "labels": ["c"]}]})
    assert one.test[0]["labels"] == [0.0, 0.0, 1.0]
    # Neither a list of two numbers nor three switches can mean anything else here.
    assert TASK.prepare(args, {"test": [{"text": "x", "labels": [0, 1]}]}).test[0]["labels"] == [
        1.0, 1.0, 0.0,
    ]  # fmt: skip
    hot = TASK.prepare(args, {"test": [{"text": "x", "labels": [0, 1, 0]}]})
    assert hot.test[0]["labels"] == [0.0, 1.0, 0.0]
    with pytest.raises(DataError, match=r"row 1: the label 'd' .* was trained for a, b, c\."):
        TASK.prepare(args, {"test": [{"text": "x", "labels": ["d"]}]})
    with pytest.raises(
        DataError, match=r"row 1: the label 'a' .* is not a list, which multi-label"
    ):
        TASK.prepare(args, {"test": [{"text": "x", "labels": "a"}]})


def test_a_model_with_unnamed_classes_keeps_their_number(tuned: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tuned)
    model.config.id2label = {index: f"LABEL_{index}" for index in range(3)}
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tuned).save_pretrained(tmp_path)
    args = make_args(pretrained_model_name_or_path=tmp_path)
    prepared = TASK.prepare(args, {"test": [{"text": "a", "label": 0}]})
    assert prepared.model_settings["num_labels"] == 3
    assert torch.equal(
        TASK.build_model(args, prepared).state_dict()["classifier.weight"],
        model.state_dict()["classifier.weight"],
    )


def test_tags_keep_the_models_order(bert_folder: Path, tmp_path: Path) -> None:
    task = get_task("token_classification")
    rows = [{"tokens": ["john", "is", "in", "paris"], "ner_tags": ["B-PER", "O", "O", "B-LOC"]}]
    folder = finetune(bert_folder, tmp_path / "tags", rows, task)
    args = make_args(pretrained_model_name_or_path=folder)
    prepared = task.prepare(args, {"test": [{"tokens": ["john"], "ner_tags": ["B-PER"]}]})
    assert prepared.extras["names"] == ("B-LOC", "B-PER", "O")
    assert prepared.test[0]["labels"] == [-100, 1, -100]
    with pytest.raises(DataError, match=r"row 1: the label 'B-X' .* was trained for B-LOC, B-PER"):
        task.prepare(args, {"test": [{"tokens": ["john"], "ner_tags": ["B-X"]}]})


def test_whether_no_answer_is_an_answer_is_the_models_to_say(
    bert_folder: Path, tmp_path: Path
) -> None:
    task = get_task("question_answering")
    given = {"question": "who ?", "context": "john lives in paris", "answers": "john"}
    args = make_args(pretrained_model_name_or_path=bert_folder, doc_stride=8)
    prepared = task.prepare(args, {"train": [given, {**given, "answers": None}]})
    task.build_model(args, prepared).save_pretrained(tmp_path)
    prepared.processor.save_pretrained(tmp_path)
    saved = make_args(pretrained_model_name_or_path=tmp_path, doc_stride=8)
    assert task.prepare(saved, {"validation": [given]}).extras["can_abstain"]
    assert not task.prepare(saved, {"train": [given]}).extras["can_abstain"]
