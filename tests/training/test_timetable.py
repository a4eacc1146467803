"""When a run logs, evaluates and saves, and when it ends early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer import RapidformerEngine
from rapidformer.config import arguments_from_mapping, resolve
from rapidformer.errors import ConfigurationError
from rapidformer.training.timetable import Timetable
from tests.training.test_templates import LineFinetuner, make_engine, read_lines


def make_timetable(train_iters: int = 40, **settings: Any) -> Timetable:
    args = resolve(arguments_from_mapping({"save": "somewhere", **settings}))
    return Timetable(args, train_iters=train_iters)


def find_due(timetable: Timetable, kind: str) -> list[int]:
    is_due = getattr(timetable, f"is_{kind}_due")
    return [step for step in range(1, 41) if is_due(step)]


def test_an_interval_below_one_is_a_share_of_the_run() -> None:
    timetable = make_timetable(eval_interval=0.25, save_interval=0.5, log_interval=0.3)
    assert find_due(timetable, "evaluation") == [10, 20, 30, 40]
    assert find_due(timetable, "save") == [20, 40]
    assert [s for s in range(1, 41) if timetable.is_log_due(s, s)] == [1, 12, 24, 36]


def test_strategies() -> None:
    by_epoch = make_timetable(eval_strategy="epoch", save_strategy="epoch", log_strategy="epoch")
    assert by_epoch.is_evaluation_due_after_epoch(1.0)
    assert by_epoch.saves_each_epoch and by_epoch.logs_each_epoch
    assert not find_due(by_epoch, "evaluation") and not find_due(by_epoch, "save")
    never = make_timetable(
        eval_strategy="no", save_strategy="no", log_strategy="no", log_first_step=True
    )
    assert not never.evaluates and not never.saves
    assert not any(never.is_log_due(step, step) for step in range(1, 41))


def test_steps_without_an_interval_follow_the_log() -> None:
    timetable = make_timetable(eval_strategy="steps", log_interval=8)
    assert find_due(timetable, "evaluation") == [8, 16, 24, 32, 40]


def test_evaluation_may_begin_later() -> None:
    assert find_due(make_timetable(eval_interval=10, eval_delay=15), "evaluation") == [20, 30, 40]
    by_epoch = make_timetable(eval_strategy="epoch", eval_delay=2)
    assert [by_epoch.is_evaluation_due_after_epoch(e) for e in (1.0, 2.0)] == [False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"eval_interval": 1.5},
            "--eval-interval must be a whole number of steps, or below 1 for a",
        ),
        ({"load_best_model_at_end": True, "save": "none"}, "needs a run folder: leave out"),
        (
            {"early_stopping_patience": 2, "eval_strategy": "no"},
            "--early-stopping-patience needs evaluations, but --eval-strategy is no.",
        ),
        (
            {"label_smoothing": 0.1, "tensor_model_parallel_size": 2},
            "--label-smoothing needs whole logits, but --tensor-model-parallel-size splits them",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(arguments_from_mapping(settings), world_size=2)


class Scripted(LineFinetuner):
    """Evaluations with accuracies that are known beforehand."""

    accuracies: tuple[float, ...] = (0.1, 0.5, 0.5, 0.4, 0.6)

    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        self.seen: list[torch.Tensor] = []

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        self.seen.append(model[0].layer.weight.detach().clone())
        return {"accuracy": self.accuracies[len(self.seen) - 1]}


def test_epochs_may_be_a_fraction(tmp_path: Path) -> None:
    LineFinetuner(make_engine(epochs=1.5, save=str(tmp_path))).train()
    assert read_lines(tmp_path)[-1]["step"] == 15


def test_a_run_stops_when_it_does_not_get_better(tmp_path: Path) -> None:
    run = Scripted(make_engine(epochs=5, save=str(tmp_path), early_stopping_patience=2))
    run.train()
    assert len(run.seen) == 4
    assert read_lines(tmp_path)[-1]["step"] == 40


def test_gains_below_the_threshold_do_not_count() -> None:
    class Slow(Scripted):
        accuracies = (0.5, 0.51, 0.52, 0.53, 0.54)

    run = Slow(make_engine(epochs=5, early_stopping_patience=2, early_stopping_threshold=0.05))
    run.train()
    assert len(run.seen) == 3


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    class Peak(Scripted):
        accuracies = (0.1, 0.9, 0.5, 0.4)

    engine = make_engine(
        epochs=4, save=str(tmp_path), load_best_model_at_end=True, save_total_limit=1
    )
    run = Peak(engine)
    run.train()
    assert torch.equal(engine.model.module.layer.weight, run.seen[1])  # type: ignore[union-attr]
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000020", "iter_0000040"]


def test_only_the_best_is_saved(tmp_path: Path) -> None:
    Scripted(make_engine(epochs=3, save=str(tmp_path), save_strategy="best")).train()
    # The last state is always kept: a run can be continued from where it ended.
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == [
        "iter_0000010", "iter_0000020", "iter_0000030",
    ]  # fmt: skip


def test_nothing_is_saved_when_asked_so(tmp_path: Path) -> None:
    LineFinetuner(make_engine(epochs=1, save=str(tmp_path), save_strategy="no")).train()
    assert not list(tmp_path.glob("iter_*")) and not (tmp_path / "last").exists()
    assert (tmp_path / "metrics.jsonl").is_file()


def test_less_may_be_better(tmp_path: Path) -> None:
    Scripted(
        make_engine(epochs=3, save=str(tmp_path), greater_is_better=False)
    ).train()  # fmt: skip
    saved = json.loads((tmp_path / "iter_0000030" / "run.json").read_text())
    assert saved["extra"]["progress"]["best_step"] == 10


def test_evaluation_before_the_first_update(tmp_path: Path) -> None:
    run = Scripted(make_engine(epochs=1, save=str(tmp_path), eval_on_start=True))
    run.train()
    assert [line["step"] for line in read_lines(tmp_path) if "eval_accuracy" in line] == [0, 10]
