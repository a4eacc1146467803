"""Trackers: names, ids, threads and failures. ``tests/borrowed/trackers.py`` has the real ones."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rapidformer.config import parse_arguments
from rapidformer.config.tracker_names import TRACKERS, find_tracker_problems, list_named
from rapidformer.errors import ConfigurationError
from rapidformer.training.report import Reporter
from rapidformer.training.trackers import TrackedRun, background
from rapidformer.training.trackers.background import Background
from rapidformer.training.trackers.build import build_tracker
from rapidformer.training.trackers.tracker import (
    SentPoints,
    name_by_phase,
    name_plainly,
    warn_of_loss,
)

MODULE = """
from pathlib import Path


class Notes:
    def start(self, run):
        self.path = run.folder / "notes.txt"
        self.write(f"start {run.name} {run.asked_project} {run.settings['seed']} {run.recall('x')}")
        run.remember("x", "id-1")

    def log(self, values, step):
        self.write(f"{step} {sorted(values)}")

    def finish(self):
        self.write("finish")

    def write(self, text):
        with self.path.open("a") as file:
            file.write(text + chr(10))
"""


class Recorder:
    """Keeps what it is told, as slowly as asked."""

    has_failed = False

    def __init__(self, seconds: float = 0.0, fails_at: str = "") -> None:
        self.calls: list[Any] = []
        self.gate = threading.Event()
        self._seconds, self._fails_at = seconds, fails_at

    def _note(self, what: str, *facts: Any) -> None:
        self.calls.append((what, *facts))
        self.gate.wait(self._seconds)
        if what == self._fails_at:
            raise RuntimeError(f"{what} is broken")

    def start(self, run: TrackedRun) -> None:
        self._note("start")

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        self._note("log", step)

    def finish(self) -> None:
        self._note("finish")


def test_names_are_those_of_transformers() -> None:
    names = ["loss", "lr", "grad_norm", "eval_loss", "test_accuracy", "tokens_per_second"]
    assert [name_by_phase(name) for name in names] == [
        "train/loss", "train/learning_rate", "train/grad_norm", "eval/loss", "test/accuracy",
        "train/tokens_per_second",
    ]  # fmt: skip
    assert [name_plainly(name) for name in names[:4]] == [
        "loss", "learning_rate", "grad_norm", "eval_loss",
    ]  # fmt: skip
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(TRACKERS) == set(INTEGRATION_TO_CALLBACK)


def test_which_trackers_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_named(None) == ["tensorboard"]
    assert list_named(["none"]) == []
    assert list_named(["mlflow", "wandb", "mlflow"]) == ["mlflow", "wandb"]
    installed = ("wandb", "trackio")
    monkeypatch.setattr("rapidformer.config.tracker_names.is_installed", lambda n: n in installed)
    assert list_named(["all", "a:B"]) == ["a:B", "wandb", "trackio"]


def test_wrong_names_are_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidformer.config.tracker_names.is_installed", lambda name: False)
    args = parse_arguments(["--report-to", "wanbd", "mlflow", "swanlab", "mine:Tracker", "x:"])
    problems = list(find_tracker_problems(args))
    assert len(problems) == 4
    assert "wanbd: there is tensorboard, wandb" in problems[0] and "mean wandb?" in problems[0]
    assert problems[1].endswith("pip install 'rapidformer[trackers]'.")
    assert problems[2].endswith("pip install swanlab.")
    assert not list(find_tracker_problems(parse_arguments([])))  # TensorBoard is only the default


def test_a_class_by_its_name_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_trackers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["--save", "run", "--no-progress", "--report-to", "my_trackers:Notes"]
    args = parse_arguments([*words, "--project", "ours", "--run-name", "first"])
    for resume_step in (0, 5):
        reporter = Reporter(args, total_steps=9, speaks=True, resume_step=resume_step)
        reporter.record({"step": 6, "loss": 1.0, "lr": 0.1})
        reporter.close()
    assert (tmp_path / "run" / "notes.txt").read_text().splitlines() == [
        "start first ours 1234 None", "6 ['loss', 'lr']", "finish",
        "start first ours 1234 id-1", "6 ['loss', 'lr']", "finish",
    ]  # fmt: skip
    assert not (tmp_path / "run" / "tensorboard").exists()
    (tmp_path / "half.py").write_text("class Half:\n    def log(self): ...\n")
    for name, said in (
        ("half:Half", "no start and no finish"), ("half:Whole", "cannot be imported"),
        ("nowhere:Class", "No module named 'nowhere'"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=said):
            build_tracker(name)


def test_a_slow_tracker_delays_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(background, "LONGEST", 4)
    monkeypatch.setattr(background, "PATIENCE", 0.2)
    slow = Recorder(seconds=60)
    feed, before = Background(slow, "slow"), time.monotonic()
    feed.start(TrackedRun())
    for step in range(10):
        feed.log({"loss": 1.0}, step)
    feed.finish()
    assert time.monotonic() - before < 50
    assert "slow has not taken everything within 0.2 s" in caplog.text
    feed.log({"loss": 1.0}, 11)  # no more than nothing
    slow.gate.set()


def test_lines_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(background, "LONGEST", 6)
    recorder = Recorder()
    feed = Background(recorder)
    for step in range(9):
        feed.log({}, step)
    feed._thread = threading.Thread(target=feed._work)
    feed._thread.start()
    feed.finish()
    assert [call[1] for call in recorder.calls[:-1]] == [0, 1, 2, 3, 4, 5]
    assert recorder.calls[-1] == ("finish",)
    assert "Recorder was too slow: 3 lines are missing there" in caplog.text


@pytest.mark.parametrize("verb", ["start", "log", "finish"])
def test_a_broken_tracker_is_left_out(
    verb: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def warn_late(name: str, reason: BaseException) -> None:
        time.sleep(0.05)  # the end of the run waits for the warning, too
        warn_of_loss(name, reason)

    monkeypatch.setattr(background, "warn_of_loss", warn_late)
    recorder = Recorder(fails_at=verb)
    feed = Background(recorder, "broken")
    feed.start(TrackedRun())
    feed.log({}, 1)
    feed.finish()
    feed.finish()
    assert caplog.text.count(f"broken cannot be written any more: {verb} is broken") == 1
    assert not feed.wait_until_started(0.1)


def test_a_tracker_hears_that_the_run_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PATIENCE", 600)  # on a busy machine
    recorder = Recorder()
    feed = Background(recorder)
    feed.start(TrackedRun())
    try:
        raise ValueError
    except ValueError:
        feed.finish()
    assert recorder.has_failed and recorder.calls == [("start",), ("finish",)]


def test_points_that_a_tracker_has_are_not_sent_again() -> None:
    sent = SentPoints({"loss": 10, "eval_loss": 5})
    assert sent.drop_from({"loss": 1.0, "eval_loss": 2.0, "new": 3.0}, 10) == {
        "eval_loss": 2.0, "new": 3.0,
    }  # fmt: skip
    assert SentPoints(everything=10).drop_from({"loss": 1.0}, 10) == {}
    assert SentPoints().drop_from({"loss": math.nan}, 0) != {}


def test_the_bridge_to_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import TrainerCallback
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    written: list[Any] = []

    class Mine(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            assert state.is_world_process_zero
            written.append((args.run_name, args.output_dir, args.to_dict()["seed"]))

        def on_log(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            written.append((state.global_step, state.epoch, details["logs"]))

        def on_train_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            written.append("end")

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "swanlab", Mine)
    feed = build_tracker("swanlab")
    feed.start(TrackedRun(name="mine", folder=tmp_path, settings={"seed": 3, "load": None}))
    feed.log({"loss": 0.5, "lr": 0.1, "epoch": 0.5, "note": "text"}, 4)
    feed.log({"eval_loss": 0.25}, 4)
    feed.finish()
    assert written == [
        ("mine", str(tmp_path), 3),
        (4, 0.5, {"loss": 0.5, "learning_rate": 0.1, "epoch": 0.5}),
        (4, 0.5, {"eval_loss": 0.25}),
        "end",
    ]
