from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.errors import DataError
from rapidformer.log import configure_logging
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

TASK = get_task("sequence_classification")
GOOD = ["good movie", "a great film", "fine book . the cat sat on the mat", "the movie is good"]
BAD = ["bad movie", "an awful film and a sad book", "not good", "the film is bad"]


def _single(label_good: Any = 1, label_bad: Any = 0) -> list[dict[str, Any]]:
    return [{"text": t, "label": label_good} for t in GOOD] + [
        {"text": t, "label": label_bad} for t in BAD
    ]


def _args(bert_folder: Path, **values: Any) -> Any:
    return make_args(pretrained_model_name_or_path=bert_folder, **values)


def test_trains_evaluates_and_predicts_from_files(bert_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", _single())
    write_jsonl(tmp_path / "dev.jsonl", _single()[2:6])
    args = _args(bert_folder, data_path=tmp_path)
    prepared = TASK.prepare(args)
    assert prepared.test is None
    model = TASK.build_model(args, prepared)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    losses = train_steps(TASK, model, prepared, steps=12)
    assert losses[-1] < losses[0]

    records = run_split(TASK, model, prepared, "validation")
    metrics = compute_metrics(TASK, records, prepared, "validation")
    batch = prepared.collate([prepared.validation[i] for i in range(4)])
    with torch.no_grad():
        whole = model(**batch)
    assert metrics["loss"] == pytest.approx(float(whole.loss), rel=1e-5)
    expected = float((whole.logits.argmax(-1) == batch["labels"]).float().mean())
    assert metrics["accuracy"] == pytest.approx(expected)
    assert set(metrics) == {"loss", "accuracy", "f1"}

    rows = TASK.predictions(records, prepared, "validation")
    assert rows[0]["text"] == GOOD[2]
    assert rows[0]["expected"] == "1" and rows[0]["label"] in {"0", "1"}
    assert sum(rows[0]["scores"].values()) == pytest.approx(1, abs=1e-4)


def test_text_labels_are_sorted_and_saved_with_the_model(bert_folder: Path, tmp_path: Path) -> None:
    rows = _single("positive", "negative")
    args = _args(bert_folder)
    prepared = TASK.prepare(args, {"train": rows, "validation": rows})
    assert prepared.model_settings["id2label"] == {0: "negative", 1: "positive"}
    model = TASK.build_model(args, prepared)
    model.save_pretrained(tmp_path)
    prepared.processor.save_pretrained(tmp_path)

    saved = make_args(load=tmp_path)
    ready = TASK.prepare_for_prediction(saved, ["good movie", "bad film"])
    again = TASK.build_model(saved, ready)
    found = TASK.predictions(run_split(TASK, again, ready, "test"), ready, "test")
    assert [row["text"] for row in found] == ["good movie", "bad film"]
    assert {row["label"] for row in found} <= {"negative", "positive"}
    assert compute_metrics(TASK, [], ready, "test") == {}

    # Evaluating the saved model: its own order of names holds, and one class may be missing.
    only = TASK.prepare(saved, {"validation": [{"text": "good", "label": "positive"}]})
    assert only.validation[0]["labels"] == 1


def test_pairs_use_both_texts(bert_folder: Path) -> None:
    rows = [
        {"idx": 0, "sentence1": "the cat", "sentence2": "a dog", "label": 0},
        {"idx": 1, "sentence1": "the cat sat", "sentence2": "the cat", "label": 1},
    ]
    prepared = TASK.prepare(_args(bert_folder, data_name="mrpc"), {"train": rows})
    ids = prepared.train[0]["input_ids"]
    assert prepared.processor.decode(ids) == "[CLS] the cat [SEP] a dog [SEP]"
    assert prepared.train[0]["token_type_ids"] == [0] * 4 + [1] * 3


def test_a_model_of_pairs_answers_no_single_text(bert_folder: Path, tmp_path: Path) -> None:
    rows = [{"sentence1": "the cat", "sentence2": "a dog", "label": number} for number in (0, 1)]
    args = _args(bert_folder)
    prepared = TASK.prepare(args, {"train": rows})
    TASK.build_model(args, prepared).save_pretrained(tmp_path)
    prepared.processor.save_pretrained(tmp_path)
    saved = make_args(load=tmp_path)
    with pytest.raises(
        DataError, match=r"pairs of texts \(sentence1 and sentence2\), and the.*one"
    ):
        TASK.prepare_for_prediction(saved, ["the cat"])
    pair = {"premise": "the cat", "hypothesis": "a dog"}
    assert TASK.prepare_for_prediction(saved, [pair]).test is not None

    # Trained on single texts since then.
    single = TASK.prepare(saved, {"train": [{"text": "the cat", "label": n} for n in (0, 1)]})
    assert single.model_settings["text_columns"] == ["text"]


def test_regression(bert_folder: Path) -> None:
    rows = [{"sentence1": t, "sentence2": "good", "score": 0.5 * i} for i, t in enumerate(GOOD)]
    args = _args(bert_folder, data_name="stsb")
    prepared = TASK.prepare(args, {"train": rows, "validation": rows})
    assert prepared.model_settings["num_labels"] == 1
    model = TASK.build_model(args, prepared)
    train_steps(TASK, model, prepared)
    records = run_split(TASK, model, prepared, "validation")
    metrics = compute_metrics(TASK, records, prepared, "validation")
    assert metrics["loss"] == pytest.approx(metrics["mse"], rel=1e-5)
    from scipy.stats import pearsonr, spearmanr

    values = [float(r["logits"][0]) for r in records]
    wanted = [row["score"] for row in rows]
    assert metrics["pearson"] == pytest.approx(pearsonr(values, wanted)[0], abs=1e-6)
    assert metrics["spearmanr"] == pytest.approx(spearmanr(values, wanted)[0], abs=1e-6)
    assert TASK.get_best_metric(prepared) == ("pearson", True)
    assert "score" in TASK.predictions(records, prepared, "validation")[0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1] * 10 + [0.5], "train, row 21: the label 0.5 in the column label is a fraction, so"),
        ([0.0, 1.0] * 10, "the labels of train in the column label are whole, but each is written"),
        ([0.0, 0.5, 0.9, 1.0], "the column label holds fractions, so the model learns a number"),
    ],
)
def test_fractions_that_turn_classes_into_numbers_are_reported(
    labels: list[float], message: str, bert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info")
    rows = [{"text": "good", "label": label} for label in labels]
    for settings, is_said in (({}, True), ({"problem_type": "regression"}, False)):
        prepared = TASK.prepare(_args(bert_folder, **settings), {"train": rows})
        assert prepared.model_settings["num_labels"] == 1
        text = capsys.readouterr().err
        assert ("(regression)" in text) == is_said
        assert not is_said or message in text


def test_several_labels_a_row(bert_folder: Path) -> None:
    rows = [
        {"text": "good movie", "labels": ["film", "good"]},
        {"text": "bad movie", "labels": ["film"]},
        {"text": "good book", "labels": ["good"]},
        {"text": "bad", "labels": []},
    ]
    args = _args(bert_folder)
    prepared = TASK.prepare(args, {"train": rows, "validation": rows})
    assert prepared.train[0]["labels"] == [1.0, 1.0] and prepared.train[3]["labels"] == [0.0, 0.0]
    model = TASK.build_model(args, prepared)
    assert model.config.problem_type == "multi_label_classification"
    train_steps(TASK, model, prepared)
    records = run_split(TASK, model, prepared, "validation")
    metrics = compute_metrics(TASK, records, prepared, "validation")
    from sklearn.metrics import f1_score

    truth = np.array([[1, 1], [1, 0], [0, 1], [0, 0]])
    guess = np.array([(r["logits"] > 0).astype(int) for r in records])
    assert metrics["f1"] == pytest.approx(f1_score(truth, guess, average="micro", zero_division=0))
    batch = prepared.collate([prepared.validation[i] for i in range(4)])
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(float(model(**batch).loss), rel=1e-5)


def test_multi_hot_lists_are_understood(bert_folder: Path) -> None:
    rows = [{"text": "good", "labels": [1, 0, 0]}, {"text": "bad", "labels": [0, 1, 1]}]
    prepared = TASK.prepare(_args(bert_folder), {"train": rows})
    assert prepared.model_settings["num_labels"] == 3
    assert prepared.train[1]["labels"] == [0.0, 1.0, 1.0]


def test_unlabelled_test_split_is_for_prediction_only(bert_folder: Path) -> None:
    hidden = [{"text": t, "label": -1} for t in GOOD]
    args = _args(bert_folder)
    prepared = TASK.prepare(args, {"train": _single(), "test": hidden})
    assert not prepared.is_labelled("test")
    assert "labels" not in prepared.test[0]
    model = TASK.build_model(args, prepared)
    records = run_split(TASK, model, prepared, "test")
    assert compute_metrics(TASK, records, prepared, "test") == {}
    assert len(TASK.predictions(records, prepared, "test")) == 4


def test_declared_class_names_are_used(bert_folder: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    data = datasets.Dataset.from_list(_single(), features=features)
    prepared = TASK.prepare(_args(bert_folder), {"train": data})
    assert prepared.model_settings["label2id"] == {"neg": 0, "pos": 1}
    assert prepared.train[0]["labels"] == 1


def test_limits_on_samples(bert_folder: Path) -> None:
    args = _args(bert_folder, max_train_samples=5, max_eval_samples=2)
    prepared = TASK.prepare(args, {"train": _single(), "validation": _single()})
    assert len(prepared.train) == 5 and len(prepared.validation) == 2


def test_gpt_classifier_gets_a_padding_token(gpt_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=gpt_folder)
    prepared = TASK.prepare(args, {"train": _single()})
    model = TASK.build_model(args, prepared)
    assert model.config.pad_token_id == prepared.processor.pad_token_id
    assert all(math.isfinite(loss) for loss in train_steps(TASK, model, prepared))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"body": "good", "label": 0}], {}, r"No column with the text was found .*the columns "
         r"body, label.*--text-column"),
        ([{"text": "good", "lable": 0}], {}, r"the label.*The data has the columns text, lable: "
         r"name it with --label-column lable"),
        ([{"body": "x", "y": 0}], {}, r"the text.* and no column with the label.*--text-column.*"
         r"--label-column"),
        (_single(), {"text_column": "txt"}, r"--text-column txt: the data has no such column. It "
         r"has the columns text, label. Did you mean --text-column text\?"),
        (_single(), {"text_pair_column": "nope"}, r"--text-pair-column nope"),
        (_single(7, 0), {}, r"labels of train are 0, 7: .* 1 never occurs.*--num-labels 8"),
        (_single(7, 0), {"num_labels": 5}, r"train, row 1: the label 7 in the column label is out "
         r"of range: the labels are 0 to 4 \(--num-labels 5\)"),
        (_single(-3, 0), {}, r"train, row 1: the label -3 is out of range"),
        (_single(None, 0), {}, r"train, row 1 \(and 3 more rows\): the column label has no label"),
        (_single([None], [{}]), {}, r"row 1: the label \[None\] in the column label holds None"),
        (_single("a", "b"), {"problem_type": "regression"}, r"row 1: the label 'a'.*not a number"),
        (_single("a", "b"), {"num_labels": 3}, r"--num-labels 3, but train has 2 different"),
        ([*_single(), {"text": None, "label": 1}], {}, r"train, row 9: the column text must "
         r"hold text, not nothing"),
    ],
)  # fmt: skip
def test_bad_data_is_reported(
    bert_folder: Path, rows: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        TASK.prepare(_args(bert_folder, **options), {"train": rows})


def test_label_that_training_never_shows(bert_folder: Path) -> None:
    bad = [*_single("a", "b"), {"text": "x", "label": "c"}]
    with pytest.raises(
        DataError,
        match=r"validation, row 9: the label 'c' .* not occur in the training data.* a, b",
    ):
        TASK.prepare(_args(bert_folder), {"train": _single("a", "b"), "validation": bad})
    bad = [{"text": "x", "label": 2}]
    with pytest.raises(DataError, match=r"validation, row 1: the label 2 .* 0 to 1\."):
        TASK.prepare(_args(bert_folder), {"train": _single(), "validation": bad})


def test_validation_without_the_column(bert_folder: Path) -> None:
    splits = {"train": _single(), "validation": [{"text": "x"}]}
    with pytest.raises(DataError, match=r"validation has no column label, only text"):
        TASK.prepare(_args(bert_folder), splits)


def test_rows_in_memory_need_no_datasets(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from rapidformer.errors import MissingPackageError

    monkeypatch.setitem(sys.modules, "datasets", None)
    args = _args(bert_folder)
    prepared = TASK.prepare(args, {"train": _single(), "validation": _single()})
    assert len(prepared.train) == 8
    with pytest.raises(MissingPackageError, match=r"needs the package datasets: pip install"):
        TASK.prepare(_args(bert_folder, data_path="glue", data_name="mrpc"))


def test_tokenized_files_on_disk_are_used_again(bert_folder: Path, tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(_single()).save_to_disk(tmp_path / "data")
    args = _args(bert_folder, data_path=str(tmp_path / "data"))
    first = TASK.prepare(args).train
    again = TASK.prepare(args).train
    assert first.cache_files and first.cache_files == again.cache_files
    longer = TASK.prepare(_args(bert_folder, data_path=args.data_path, seq_length=4)).train
    assert longer.cache_files != first.cache_files
    assert max(len(row["input_ids"]) for row in longer) == 4
