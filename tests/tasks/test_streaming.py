"""Evaluation holds a bounded number of records, and tallies of a fixed size."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.engine import RapidformerEngine
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.evaluation import evaluating
from rapidformer.tasks.metrics.classification import (
    ClassTally,
    EntityTally,
    MultiLabelTally,
    RegressionTally,
    TagTally,
)
from rapidformer.tasks.metrics.generation import TextTally
from rapidformer.tasks.metrics.tally import ChoiceTally, TokenTally
from rapidformer.tasks.text.windows import AnswerTally

ROWS = 100_000
LOSS = {"loss": 0.5, "count": 1}
LOGITS = np.array([0.1, 0.7, 0.2], dtype=np.float32)
CLASS = {**LOSS, "logits": LOGITS, "label": 1}
TAGGED = {**LOSS, "guesses": np.array([0, 1, 2]), "labels": np.array([0, 1, 1])}


class _Record(dict[str, Any]):
    """A record that counts how many of its kind are alive."""

    alive = 0
    most = 0

    def __init__(self) -> None:
        super().__init__(CLASS)
        _Record.alive += 1
        _Record.most = max(_Record.most, _Record.alive)

    def __del__(self) -> None:
        _Record.alive -= 1


def test_of_100_000_rows_only_some_records_are_held_at_a_time() -> None:
    rows_per_batch = 50

    class Loader:
        samples_per_round = rows_per_batch
        device = torch.device("cpu")

        def iterate_micro_batches(self) -> Iterator[Any]:
            for _ in range(ROWS // rows_per_batch):
                yield SimpleNamespace(batch=None, info=SimpleNamespace(rows=rows_per_batch))

    class Task:
        def evaluate_step(self, model: Any, batch: Any, prepared: Any) -> list[_Record]:
            return [_Record() for _ in range(rows_per_batch)]

        def build_tally(self, prepared: Any, split: str) -> ClassTally:
            return ClassTally(["a", "b", "c"])

    _Record.alive = _Record.most = 0
    done: list[int] = []
    engine: Any = RapidformerEngine(args={"micro_batch_size": 1})
    data = PreparedData(collate=list, processor=None)
    tally = evaluating.measure(engine, Task(), None, Loader(), data, "test", done.append)  # type: ignore[arg-type]
    engine.close()
    assert tally.examples == sum(done) == ROWS
    assert tally.compute() == {"loss": 0.5, "accuracy": 1.0, "f1": 1.0}
    assert _Record.alive == 0
    # Those of one gathering, which the tally has just read, and those of the next.
    assert _Record.most <= 2 * 1024


def build_answer_tally(questions: int) -> AnswerTally:
    """Two windows per question."""
    windows = [
        {"example": number // 2, "starts": [0, 0, 4], "ends": [0, 3, 7]}
        for number in range(2 * questions)
    ]
    row = {"context": "one two", "answers": {"text": ["two"], "answer_start": [4]}}
    extras = {
        "rows": {"test": [row] * questions}, "windows": {"test": windows},
        "columns": ("q", "context"), "answers": "answers",
        "can_abstain": False, "n_best": 2, "max_answer_length": 5,
    }  # fmt: skip
    return AnswerTally(PreparedData(collate=None, processor=None, extras=extras), "test")  # type: ignore[arg-type]


WINDOW = {
    **LOSS, "first": np.array([1, 2]), "last": np.array([2, 1]), "null": 0.0,
    "first_score": np.array([0.1, 0.9]), "last_score": np.array([0.8, 0.2]),
}  # fmt: skip


def read_targets(first: int, count: int) -> tuple[list[str], list[str]]:
    return ["the cat sat on a mat"] * count, ["en-de", "en-fr"] * (count // 2)


@pytest.mark.parametrize(
    ("tally", "record", "names"),
    [
        (ClassTally(["a", "b", "c"]), CLASS, ["_matrix"]),
        (MultiLabelTally(["a", "b", "c"]), {**CLASS, "label": [0.0, 1.0, 1.0]}, ["_matrix"]),
        (TokenTally(), {**LOSS, "by_token": {"accuracy": (1, 1)}}, ["_sums", "_counts"]),
        (ChoiceTally(), CLASS, []),
        (EntityTally(["O", "B-X", "I-X"]), TAGGED, ["_right", "_guessed", "_wanted"]),
        (TagTally(["NOUN", "VERB", "ADJ"]), TAGGED, ["_matrix"]),
        (
            TextTally(lambda record: "the cat on a mat", read_targets),
            {**LOSS, "generated": ()},
            ["_scores", "_by_pair"],
        ),
        (build_answer_tally(8), WINDOW, ["_scores", "_open", "_examples"]),
    ],
)
def test_a_tally_does_not_grow(tally: Any, record: Any, names: list[str]) -> None:
    def measure() -> int:
        """The size of what it keeps: every number, and what belongs to the metrics."""
        state = {name: value for name, value in vars(tally).items() if isinstance(value, float)}
        return len(pickle.dumps([state, *(_get_state(getattr(tally, name)) for name in names)]))

    tally.update([record] * 4)
    size = measure()
    for _ in range(3):
        tally.update([record] * 4)
        assert measure() == size
    assert tally.examples in (16, 7), "the last question is open until the next one begins"


def _get_state(value: Any) -> Any:
    """Numbers as eight bytes each, so that only their number counts, and not their digits."""
    if hasattr(value, "metric_state"):
        return {name: _get_state(state) for name, state in value.metric_state.items()}
    if hasattr(value, "tolist"):
        return np.zeros(np.shape(value)).tolist()
    if isinstance(value, dict):
        return {key: _get_state(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_get_state(each) for each in value]
    if isinstance(value, (int, float)):
        return 0.0
    return _get_state(vars(value)) if hasattr(value, "__dict__") else value


def test_spearman_keeps_two_numbers_per_row() -> None:
    tally = RegressionTally()
    rows = {**LOSS, "logits": np.array([0.5]), "label": 1.0}
    for _ in range(100):
        tally.update([rows] * (ROWS // 100))
    assert tally.examples == ROWS
    held = [value for value in vars(tally).values() if hasattr(value, "itemsize")]
    assert sum(len(value) * value.itemsize for value in held) == 16 * ROWS


def test_answers_scored_in_parts_are_those_scored_at_once() -> None:
    """A gathering may end between two windows of a question."""
    dice = np.random.default_rng(0)
    windows = [
        {**WINDOW, "first_score": dice.random(2), "last_score": dice.random(2)} for _ in range(12)
    ]
    at_once, in_parts = build_answer_tally(6), build_answer_tally(6)
    at_once.update(windows)
    for start in range(0, 12, 3):
        in_parts.update(windows[start : start + 3])
    found = in_parts.compute()
    assert found == at_once.compute() and in_parts.examples == 6
    assert 0 < found["exact_match"] < 100
