from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rapidformer
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.run_events import read_events
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

TASK = get_task("question_answering")
LONG = (
    " ".join(["the cat sat on the mat ."] * 6) + " mary lives in paris . " + "the dog runs . " * 6
)
ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "question": "where lives john ?",
        "context": "john lives in london .",
        "answers": {"text": ["london", "in london"], "answer_start": [14, 11]},
    },
    {
        "id": "b",
        "question": "where lives mary ?",
        "context": LONG,
        "answers": {"text": ["paris"], "answer_start": [LONG.index("paris")]},
    },
]
NONE = {
    "id": "c",
    "question": "who eats ?",
    "context": "the dog sleeps .",
    "answers": {"text": [], "answer_start": []},
}


def _args(bert_folder: Path, **values: Any) -> Any:
    values = {"seq_length": 32, "doc_stride": 8, **values}
    return make_args(pretrained_model_name_or_path=bert_folder, **values)


def test_windows_cover_a_long_context(bert_folder: Path) -> None:
    prepared = TASK.prepare(_args(bert_folder), {"train": ROWS, "validation": ROWS})
    assert len(prepared.train) > 3
    tokenizer = prepared.processor
    found = 0
    for index in range(len(prepared.train)):
        row = prepared.train[index]
        assert len(row["input_ids"]) <= 32
        first, last = row["start_positions"], row["end_positions"]
        if last:
            found += 1
            assert tokenizer.decode(row["input_ids"][first : last + 1]) in {"london", "paris"}
    assert found >= 2
    assert set(prepared.validation[0]) >= {"context_mask", "start_positions"}
    assert "starts" not in prepared.validation[0]


def test_positions_if_the_tokenizer_pads_on_the_left(bert_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(bert_folder, tmp_path / "left")
    AutoTokenizer.from_pretrained(folder, padding_side="left").save_pretrained(folder)
    prepared = TASK.prepare(_args(folder), {"train": [*ROWS, NONE]})
    tokenizer = prepared.processor
    assert tokenizer.padding_side == "left"
    batch = prepared.collate([prepared.train[i] for i in range(len(prepared.train))])
    assert not batch["attention_mask"].all()
    columns = (batch["input_ids"], batch["start_positions"], batch["end_positions"])
    answers = {
        tokenizer.decode(ids[first : last + 1]) for ids, first, last in zip(*columns, strict=True)
    }
    assert answers == {"london", "paris", "[CLS]"}


def test_trains_evaluates_and_predicts(bert_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "dev.jsonl", ROWS)
    args = _args(bert_folder, data_path=tmp_path)
    prepared = TASK.prepare(args)
    model = TASK.build_model(args, prepared)
    losses = train_steps(TASK, model, prepared, steps=40)
    assert losses[-1] < losses[0]
    records = run_split(TASK, model, prepared, "validation")
    rows = TASK.predictions(records, prepared, "validation")
    assert [row["id"] for row in rows] == ["a", "b"]
    for row, given in zip(rows, ROWS, strict=True):
        assert row["answer"] == given["context"][row["start"] : row["end"]]
        assert row["expected"] == given["answers"]["text"]
    metrics = compute_metrics(TASK, records, prepared, "validation")
    batch = prepared.collate([prepared.validation[i] for i in range(len(prepared.validation))])
    with torch.no_grad():
        whole = float(TASK.forward(model, batch))
        windows = [
            prepared.collate([prepared.validation[i]]) for i in range(len(batch["input_ids"]))
        ]
        apart = [float(TASK.forward(model, window)) for window in windows]
        # Without padding, it is the model's own loss.
        own = float(model(**{k: v for k, v in windows[0].items() if k != "context_mask"}).loss)
    assert metrics["loss"] == pytest.approx(whole, rel=1e-5)
    assert whole == pytest.approx(np.mean(apart), rel=1e-5), "padding does not count"
    assert apart[0] == pytest.approx(own, rel=1e-5)
    assert 0 <= metrics["exact_match"] <= metrics["f1"] <= 100


def test_a_run_shows_the_answers_to_its_first_rows(bert_folder: Path, tmp_path: Path) -> None:
    rows = [row | {"id": f"{row['id']}{number}"} for number in range(5) for row in ROWS]
    splits = {"train": ROWS, "validation": rows}
    metrics = rapidformer.train(
        splits, task=TASK.name, pretrained_model_name_or_path=str(bert_folder), seq_length=32,
        doc_stride=8, train_iters=1, micro_batch_size=4, device="cpu", save=str(tmp_path / "run"),
    )  # fmt: skip
    assert 0 <= metrics["f1"] <= 100
    events = read_events(tmp_path / "run")
    (evaluation,) = (event for event in events if event["event"] == "evaluation")
    assert [row["id"] for row in evaluation["samples"]] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_best_span_equals_brute_force(bert_folder: Path) -> None:
    args = _args(bert_folder, n_best=1000, max_answer_length=5)
    prepared = TASK.prepare(args, {"validation": ROWS})
    model = TASK.build_model(args, prepared)
    rows = TASK.predictions(run_split(TASK, model, prepared, "validation"), prepared, "validation")
    windows = prepared.extras["windows"]["validation"]
    best: dict[int, tuple[float, int, int]] = {}
    for index in range(len(prepared.validation)):
        batch = prepared.collate([prepared.validation[index]])
        mask = batch["context_mask"][0].numpy()
        with torch.no_grad():
            out = model(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"])
        start, end = out.start_logits[0].numpy(), out.end_logits[0].numpy()
        window = windows[index]
        for i in np.nonzero(mask)[0]:
            for j in range(i, min(i + 5, len(mask))):
                if mask[j]:
                    span = (start[i] + end[j], window["starts"][i], window["ends"][j])
                    owner = window["example"]
                    best[owner] = max(best.get(owner, (-1e9, 0, 0)), span)
    assert [(row["start"], row["end"]) for row in rows] == [best[0][1:], best[1][1:]]


def test_questions_without_answer(bert_folder: Path, tmp_path: Path) -> None:
    args = _args(bert_folder)
    prepared = TASK.prepare(args, {"train": [*ROWS, NONE], "validation": [ROWS[0], NONE]})
    assert prepared.extras["can_abstain"]
    model = TASK.build_model(args, prepared)
    records = run_split(TASK, model, prepared, "validation")
    for record in records:
        record["null"] = 1e6
    rows = TASK.predictions(records, prepared, "validation")
    assert [row["answer"] for row in rows] == ["", ""]
    metrics = compute_metrics(TASK, records, prepared, "validation")
    assert metrics["exact_match"] == 50.0 and metrics["no_answer_f1"] == 100.0
    tally = TASK.build_tally(prepared, "validation")
    tally.update(records)
    (table,) = tally.tables()  # of all questions, also if nobody has asked for the scores yet
    assert table.to_json()["all"]["support"] == 2
    # The saved model still knows that it may abstain.
    model.save_pretrained(tmp_path)
    prepared.processor.save_pretrained(tmp_path)
    saved = make_args(load=tmp_path, seq_length=32, doc_stride=8)
    ready = TASK.prepare_for_prediction(saved, [{"question": "who ?", "context": LONG}])
    assert ready.extras["can_abstain"]
    found = TASK.predictions(
        run_split(TASK, TASK.build_model(saved, ready), ready, "test"), ready, "test"
    )
    assert len(found) == 1 and found[0]["question"] == "who ?"


def test_plain_text_answers_are_looked_up(bert_folder: Path) -> None:
    rows = [{"question": "where ?", "context": "in paris .", "answer": "paris"}]
    prepared = TASK.prepare(_args(bert_folder), {"train": rows})
    row = prepared.train[0]
    decoded = prepared.processor.decode(row["input_ids"][row["start_positions"]])
    assert decoded == "paris"


def test_a_question_longer_than_the_window_is_cut(bert_folder: Path) -> None:
    rows = [{**ROWS[0], "question": "where is the cat " * 30}]
    prepared = TASK.prepare(_args(bert_folder), {"train": rows})
    assert all(len(prepared.train[i]["input_ids"]) <= 32 for i in range(len(prepared.train)))


def test_bad_input_is_reported(bert_folder: Path) -> None:
    bad = [{**ROWS[0], "answers": {"text": ["tokyo"], "answer_start": [3]}}]
    with pytest.raises(DataError, match=r"train, row 1: the answer 'tokyo' is not in its context"):
        TASK.prepare(_args(bert_folder), {"train": bad})
    bad = [{**ROWS[0], "answers": 5}]
    with pytest.raises(DataError, match=r"train, row 1: the column answers holds '5'"):
        TASK.prepare(_args(bert_folder), {"train": bad})
    # A file of rows of which one has an empty object: every row gets the others' keys.
    none = TASK.prepare(_args(bert_folder), {"train": [{**ROWS[0], "answers": {"text": None}}]})
    assert none.train[0]["start_positions"] == 0
    short = TASK.prepare(_args(bert_folder, doc_stride=None), {"train": ROWS})
    assert len(short.train) > len(ROWS), "half a window overlaps, not 128 tokens"
    with pytest.raises(ConfigurationError, match=r"--doc-stride 29 leaves no room.*at most 14"):
        TASK.prepare(_args(bert_folder, doc_stride=29), {"train": ROWS})
    with pytest.raises(ConfigurationError, match=r"--seq-length 100 is longer than the 64"):
        TASK.prepare(_args(bert_folder, seq_length=100), {"train": ROWS})
    with pytest.raises(DataError, match=r"needs a question and a context"):
        TASK.prepare_for_prediction(_args(bert_folder), ["who ?"])


def test_all_missing_columns_are_reported_at_once(bert_folder: Path) -> None:
    message = r"No column with the question.*and no column with the text that.*and no column with"
    with pytest.raises(DataError, match=message):
        TASK.prepare(_args(bert_folder), {"train": [{"q": "who ?", "c": "x", "a": "x"}]})
    message = r"--question-column asks: .*Did you mean --question-column ask\?.*--context-column"
    with pytest.raises(DataError, match=message):
        args = _args(bert_folder, question_column="asks")
        TASK.prepare(args, {"train": [{"ask": "who ?", "c": "x", "answers": "x"}]})
