"""Sweeps: what is tried depends on the seed and on results alone, however often one is killed."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rapidformer.config import parse_arguments
from rapidformer.errors import ConfigurationError
from rapidformer.sweeping.space import Choices, Range, list_choices, parse_space, to_flags
from rapidformer.sweeping.study import Outcome, Study, run_trials

pytest.importorskip("optuna", reason="the extra rapidformer[search] is not installed")
SPACE = {"lr": Range(1e-5, 1e-1, False, True), "micro_batch_size": Choices((8, 16, 32))}


@contextmanager
def in_memory() -> Iterator[None]:
    """Optuna's file is slow, and not every test needs one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapidformer.sweeping.study.locate_storage", lambda folder: None)
        yield


class KilledError(Exception):
    """Stands for a kill: nothing that comes later happens."""


def compute(parameters: dict[str, Any]) -> list[float]:
    """Three evaluations, the better the nearer the rate is to 1e-3."""
    distance = abs(math.log10(parameters["lr"]) + 3) + parameters["micro_batch_size"] / 100
    return [distance + 1 / (step + 1) for step in range(3)]


def sweep(folder: Path, count: int = 13, parallel: int = 1, killed_at: int = -1) -> list[Any]:
    """The trials; each is pruned or fails as the command would have it, at its own pace."""
    folder.mkdir(exist_ok=True)
    study = Study(folder, SPACE, is_greater_better=False, seed=7, parallel=parallel)

    def run(number: int, parameters: dict[str, Any], stop: threading.Event) -> Outcome:
        if number == killed_at:
            raise KilledError
        time.sleep(random.random() / 200 if parallel > 1 else 0)
        if number == 5:
            return Outcome("failed", error="out of memory")
        values = compute(parameters)
        for end in range(1, 4):
            if study.is_hopeless(number, values[:end]):
                return Outcome("pruned", values[:end])
        return Outcome("complete", values)

    run_trials(study, count, parallel, run, lambda trial: None)
    return study.trials


@pytest.mark.parametrize("parallel", [1, 3])
def test_killed_twice_is_the_same_sweep(tmp_path: Path, parallel: int) -> None:
    with in_memory():
        whole = sweep(tmp_path / "whole", parallel=parallel)
    for killed_at in (4, 11):
        with pytest.raises(KilledError):
            sweep(tmp_path / "killed", parallel=parallel, killed_at=killed_at)
    assert sweep(tmp_path / "killed", parallel=parallel) == whole
    states = [trial.state for trial in whole]
    assert [trial.number for trial in whole] == list(range(13))
    assert states[5] == "failed" and whole[5].error == "out of memory"
    assert {"complete", "pruned"} < set(states) and states[:4] == ["complete"] * 4
    assert len({trial.parameters["lr"] for trial in whole}) > 10
    complete = [trial for trial in whole if trial.state == "complete"]
    assert all(trial.value == min(compute(trial.parameters)) for trial in complete)
    # A sweep of more trials begins with the same ones, and has no more to do for fewer.
    assert sweep(tmp_path / "killed", count=14, parallel=parallel)[:13] == whole
    assert len(sweep(tmp_path / "killed", count=3, parallel=parallel)) == 14


@in_memory()
def test_results_decide_what_is_tried_next(tmp_path: Path) -> None:
    """After ten trials at random, which do not depend on any."""
    drawn = []
    for sign in (1, -1, 1):
        study = Study(tmp_path, SPACE, is_greater_better=False, seed=3)
        for number in range(12):
            values = compute(study.choose(number))
            study.add(number, Outcome("complete", [sign * value for value in values]))
        drawn.append([trial.parameters for trial in study.trials])
    up, down, same = drawn
    assert up == same and up[:10] == down[:10] and up[10:] != down[10:]


@in_memory()
def test_several_trials_run_at_once(tmp_path: Path) -> None:
    study = Study(tmp_path, SPACE, is_greater_better=False, seed=1, parallel=2)
    meeting = threading.Barrier(2, timeout=30)

    def run(number: int, parameters: dict[str, Any], stop: threading.Event) -> Outcome:
        meeting.wait()
        return Outcome("complete", [1.0])

    run_trials(study, 4, 2, run, lambda trial: None)
    assert study.ended == 4


@in_memory()
def test_choices_are_tried_once_each(tmp_path: Path) -> None:
    space = {"lr": Choices((0.1, 0.2)), "micro_batch_size": Choices((1, 2, 4))}
    combined = list_choices(space, seed=3)
    assert len({json.dumps(one) for one in combined}) == 6
    study = Study(tmp_path, space, is_greater_better=True, seed=3)
    run_trials(
        study, 4, 1, lambda number, chosen, stop: Outcome("complete", [chosen["lr"]]),
        lambda trial: None,
    )  # fmt: skip
    assert [trial.parameters for trial in study.trials] == combined[:4]
    assert study.best is not None and study.best.value == 0.2


@in_memory()
def test_a_trial_without_a_finite_value_has_failed(tmp_path: Path) -> None:
    study = Study(tmp_path, SPACE, is_greater_better=False, seed=1)
    study.choose(0)
    assert study.add(0, Outcome("complete", [math.nan])).error == "no evaluation has a finite value"
    assert study.best is None


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"is_greater_better": False, "seed": 1}
    Study(tmp_path, SPACE, description={"--metric": "eval_loss"}, **options)
    Study(tmp_path, SPACE, description={"--metric": "eval_loss"}, **options)
    with pytest.raises(ConfigurationError, match=r"\(--metric: eval_loss, now eval_f1\)"):
        Study(tmp_path, SPACE, description={"--metric": "eval_f1"}, **options)


def test_what_to_try() -> None:
    texts = ["learning_rate=1e-5..1e-3:log", "micro-batch-size=8,16", "epochs=1..4",
             "seed=1..3", "compile=true,false", "lr_decay_style=linear,cosine"]  # fmt: skip
    space = parse_space(texts, parse_arguments([]))
    assert space["lr"] == Range(1e-5, 1e-3, False, True)
    assert space["micro_batch_size"] == Choices((8, 16))
    assert space["epochs"] == Range(1, 4, False, False)
    assert space["seed"] == Range(1, 3, True, False)
    assert space["compile"] == Choices((True, False))
    assert Range(1e-5, 1e-3, False, True).shorten(0.000123456) == 0.0001235
    assert Range(1e-5, 1e-3, False, True).shorten(9.9999e-4) == 1e-3
    assert to_flags({"lr": 1e-05, "compile": False, "epochs": 2}) == [
        "--lr=1e-05", "--compile=false", "--epochs=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "write name=low..high"),
        ("lrr=1,2", "no setting lrr. Did you mean lr?"),
        ("lr=1e-3..1e-5", "from a smaller to a larger number"),
        ("lr=0..1:log", "begins above 0"),
        ("lr=1..2:lin", "may be log, got 'lin'"),
        ("lr=1,x", "needs a number, got 'x'"),
        ("seed=1,1", "there twice"),
        ("seed=1.5..3", "needs a whole number"),
        ("optimizer=adam..sgd", "list its values"),
        ("save=a,b", "the same for all trials"),
        ("micro_batch_size=1,2", "given twice"),
    ],
)
def test_what_cannot_be_tried(text: str, said: str) -> None:
    args = parse_arguments(["--micro-batch-size", "4"])
    with pytest.raises(ConfigurationError) as error:
        parse_space([text], args)
    assert said in str(error.value)
