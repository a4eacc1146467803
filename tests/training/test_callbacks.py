"""The loop's hook points: when they come, what they see, and what they may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer.training.callbacks import Callback, Control
from rapidformer.training.loop import TrainingLoop
from tests.training.test_templates import LineFinetuner, make_engine, read_lines

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
ROWS, BATCH = 40, 4
PER_EPOCH = ROWS // BATCH


class Recorder(Callback):
    """Writes down each hook with its step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.facts: dict[str, list[Any]] = {}


def _make_hook(name: str) -> Callable[..., None]:
    def hook(self: Recorder, loop: TrainingLoop, control: Control, *facts: Any) -> None:
        self.seen.append((name, loop.step))
        self.facts.setdefault(name, []).extend(facts)

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _make_hook(_name))


class Asking(Callback):
    """Asks for something after one step, or before one epoch's first."""

    def __init__(self, step: int, flag: str) -> None:
        self.step, self.flag = step, flag

    def on_step_end(self, loop: TrainingLoop, control: Control) -> None:
        if loop.step == self.step:
            setattr(control, self.flag, True)


def train(*callbacks: Callback, **settings: Any) -> LineFinetuner:
    finetuner = LineFinetuner(make_engine(**{"log_interval": 100, **settings}))
    finetuner.callbacks = callbacks
    finetuner.train()
    return finetuner


def test_hooks_come_in_transformers_order(tmp_path: Path) -> None:
    recorder = Recorder()
    train(recorder, train_iters=2, log_interval=2, save=str(tmp_path / "run"))
    assert recorder.seen == [
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        ("on_step_begin", 0),
        ("on_pre_optimizer_step", 0),
        ("on_optimizer_step", 1),
        ("on_step_end", 1),
        ("on_log", 1),  # --log-first-step
        ("on_step_begin", 1),
        ("on_pre_optimizer_step", 1),
        ("on_optimizer_step", 2),
        ("on_step_end", 2),
        ("on_log", 2),
        ("on_epoch_end", 2),
        ("on_log", 2),  # of the last evaluation
        ("on_evaluate", 2),
        ("on_pre_save", 2),
        ("on_save", 2),
        ("on_train_end", 2),
    ]
    (metrics,) = recorder.facts["on_evaluate"]
    assert set(metrics) == {"eval_error", "eval_examples"}
    assert {"loss", "lr", "step", "epoch"} <= set(recorder.facts["on_log"][0])
    assert recorder.facts["on_save"] == [tmp_path / "run" / "iter_0000002"]


def test_each_epoch_begins_and_ends() -> None:
    recorder = Recorder()
    train(recorder, epochs=2)
    epochs = [each for each in recorder.seen if "epoch" in each[0]]
    assert epochs == [
        ("on_epoch_begin", 0),
        ("on_epoch_end", PER_EPOCH),
        ("on_epoch_begin", PER_EPOCH),
        ("on_epoch_end", 2 * PER_EPOCH),
    ]


@pytest.mark.parametrize("flag", ["should_log", "should_evaluate", "should_save"])
def test_what_a_callback_asks_for_is_done_once(flag: str, tmp_path: Path) -> None:
    recorder = Recorder()
    folder = tmp_path / "run"
    train(Asking(3, flag), recorder, train_iters=6, log_first_step=False, save=str(folder))
    hook = flag.replace("should_", "on_")
    steps = [step for name, step in recorder.seen if name == hook]
    # Logged before the last evaluation, evaluated and saved at the end, as in any run.
    assert steps == ([3, 6, 6] if flag == "should_log" else [3, 6])
    if flag == "should_save":
        assert (folder / "iter_0000003").is_dir()


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    recorder = Recorder()
    finetuner = train(
        Asking(3, "should_training_stop"), recorder, epochs=1, save=str(tmp_path / "run")
    )
    assert finetuner.engine.updates.clock.updates == 3
    assert recorder.seen[-1] == ("on_train_end", 3)
    evaluated = [line for line in read_lines(tmp_path / "run") if "eval_error" in line]
    assert evaluated[-1]["step"] == 3


def test_a_callback_may_leave_an_epoch() -> None:
    recorder = Recorder()
    train(Asking(3, "should_epoch_stop"), recorder, train_iters=5)
    assert [step for name, step in recorder.seen if name == "on_epoch_begin"] == [0, 3]


def test_asking_for_what_a_run_does_not_have_does_nothing() -> None:
    """No folder, no validation data."""

    class WithoutValidation(LineFinetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            train_data, _, _, collate = super().train_valid_test_datasets_provider()
            return train_data, None, None, collate

    finetuner = WithoutValidation(make_engine(train_iters=2))
    finetuner.callbacks = [Asking(1, "should_save"), Asking(1, "should_evaluate")]
    assert finetuner.train() == {}
