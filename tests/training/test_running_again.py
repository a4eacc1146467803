"""Runs into a folder that has seen a run before: replaced, resumed, gone back, or in use."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rapidformer import RapidformerEngine
from rapidformer.checkpoint.finding import find_checkpoint, find_checkpoints
from rapidformer.checkpoint.lock import LOCK_FILE
from rapidformer.config import parse_arguments
from rapidformer.config.validate import find_problems
from rapidformer.errors import CheckpointError, RapidformerError, TrainingError
from rapidformer.training.run_folder import set_aside
from tests.processes import run_in_kept_processes
from tests.training.test_templates import LineFinetuner, Regression, make_engine, read_lines


class Killed(BaseException):
    """The process is gone: nothing may clean up after it."""


class Fails(LineFinetuner):
    """Ends before its first checkpoint."""

    error: type[BaseException] = RapidformerError

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        raise self.error("bad luck")


class Dies(Fails):
    error = Killed


def train(
    folder: Path, kind: type[LineFinetuner] = LineFinetuner, **settings: Any
) -> LineFinetuner:
    template = kind(make_engine(save=str(folder), **{"epochs": 1, **settings}))
    template.train()
    return template


def get_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def list_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in find_checkpoints(folder)]


# ---- --overwrite -------------------------------------------------------------------------------


def test_a_run_that_fails_early_does_not_cost_the_one_it_was_to_replace(tmp_path: Path) -> None:
    train(tmp_path)
    names, lines = get_names(tmp_path), read_lines(tmp_path)
    with pytest.raises(RapidformerError, match="bad luck"):
        train(tmp_path, Fails, overwrite=True)
    assert (get_names(tmp_path), read_lines(tmp_path)) == (names, lines)
    train(tmp_path, overwrite=True, save_interval=2)
    assert list_steps(tmp_path) == [2, 4, 6, 8, 10]
    assert get_names(tmp_path) == sorted([*names, *(f"iter_000000{i}" for i in (2, 4, 6, 8))])


@pytest.mark.parametrize("flag", ["save", "load"])
def test_an_empty_folder_name_is_not_the_current_folder(flag: str) -> None:
    assert find_problems(parse_arguments([f"--{flag}", ""])) == [
        f"--{flag} is empty: name a folder, or leave the flag out."
    ]


def test_a_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    train(tmp_path)
    assert LOCK_FILE not in get_names(tmp_path)


# ---- weights that are not finite ---------------------------------------------------------------


class Breaks(LineFinetuner):
    """The loss stays fine, but a weight that it does not depend on is infinite from step 7 on."""

    steps = 0

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        model = Regression()
        model.unused = torch.nn.Parameter(torch.zeros(1))
        return model, None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        if self.steps == 7:
            model.unused.data.fill_(float("inf"))
        return model(**batch)


def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"weights are not finite at step 8 \(unused\)"):
        train(tmp_path, Breaks, save_interval=2, save_total_limit=1, eval_interval=100)
    assert list_steps(tmp_path) == [6]
    assert not (tmp_path / "last").exists()
    assert [name for name in get_names(tmp_path) if "staging" in name] == []


def test_weights_that_are_not_finite_never_become_the_best_model(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not finite at step 8"):
        train(tmp_path, Breaks, eval_interval=4)
    kept = load_file(tmp_path / "best" / "model.safetensors")
    assert kept["unused"].isfinite().all(), "that of step 4"


# ---- going back --------------------------------------------------------------------------------


def test_a_run_that_goes_back_leaves_its_later_part_behind(tmp_path: Path) -> None:
    train(tmp_path, save_interval=2, eval_interval=2)
    # The loss falls with every step: the best model is that of step 10.
    back = {"load": str(tmp_path / "iter_0000006"), "lr": 0.0}
    with pytest.raises(RapidformerError, match="bad luck"):
        train(tmp_path, Fails, **back)
    assert list_steps(tmp_path) == [2, 4, 6]
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000006", "nothing later comes back"
    assert max(line["step"] for line in read_lines(tmp_path)) == 6
    assert not (tmp_path / "best").exists() and not (tmp_path / "last").exists()
    assert get_names(tmp_path / ".abandoned") == ["best", "iter_0000008", "iter_0000010", "last"]
    branch = train(tmp_path, load=str(tmp_path), lr=0.0, save_interval=2, eval_interval=2)
    assert ".abandoned" not in get_names(tmp_path)
    assert list_steps(tmp_path) == [2, 4, 6, 8, 10]
    errors = {
        line["step"]: line["eval_error"] for line in read_lines(tmp_path) if "eval_error" in line
    }
    assert errors[8] == errors[10] == errors[6], "the branch learns nothing"
    assert branch.engine.args.save == str(tmp_path)


def test_the_best_model_of_a_step_before_stays(tmp_path: Path) -> None:
    train(tmp_path, epochs=0.2, eval_interval=2, save_interval=2)
    train(tmp_path, load=str(tmp_path), lr=0.0, eval_interval=2, save_interval=2)
    with pytest.raises(RapidformerError, match="bad luck"):
        train(tmp_path, Fails, load=str(tmp_path / "iter_0000006"))
    assert (tmp_path / "best").is_dir()


def test_a_loop_of_the_users_own_goes_back_too(tmp_path: Path) -> None:
    def save_at(steps: list[int], load: Path | None = None) -> RapidformerEngine:
        engine = make_engine()
        engine.compose(Regression())
        if load is not None:
            engine.load_checkpoint(load)
        for step in steps:
            engine.updates.clock.updates = step
            engine.save_checkpoint(tmp_path)
        engine.close()
        return engine

    save_at([2, 4, 6])
    save_at([3, 5], load=tmp_path / "iter_0000002")
    assert list_steps(tmp_path) == [2, 3, 5]


# ---- the same command again --------------------------------------------------------------------


def test_one_command_starts_a_run_and_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm's requeue repeats it: killed before the first checkpoint, after it, and finished."""
    monkeypatch.setattr("rapidformer.training.template.restore_replaced", lambda folder: None)
    command = {"resume": "auto", "save_interval": 4}
    with pytest.raises(Killed):
        train(tmp_path, Dies, **command)
    with pytest.raises(RapidformerError, match=r"a run without a checkpoint.*--resume auto"):
        train(tmp_path)
    stopped = train(tmp_path, **command, exit_interval=4)
    assert stopped.engine.updates.clock.updates == 4
    resumed = train(tmp_path, **command)
    assert resumed.engine.checkpoints.resumed_from == tmp_path / "iter_0000004"
    assert [line["step"] for line in read_lines(tmp_path) if "loss" in line] == [1, 4, 8, 10]
    again = train(tmp_path, **command)
    assert again.engine.updates.clock.updates == 10


def test_resume_auto_says_that_it_replaces_a_run_with_only_a_best_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, save_strategy="no")
    assert (tmp_path / "best").is_dir() and not find_checkpoints(tmp_path)
    train(tmp_path, resume="auto", log_level="warning")
    assert "has a model in best/, but no checkpoint to resume from: it is replaced" in (
        capsys.readouterr().err
    )


def _fail_on_rank_0(folder: Path) -> list[str]:
    """What each rank meets if only rank 0 touches the disk, and the disk is full."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    problems = []
    engine = make_engine(save=str(folder), epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapidformer.training.template.begin_run", fail)
        with pytest.raises(CheckpointError) as caught:
            LineFinetuner(engine).train()
        problems.append(str(caught.value))
        patch.setattr("rapidformer.training.run_folder._list_run", fail)
        with pytest.raises(CheckpointError) as caught:
            set_aside(folder)
        problems.append(str(caught.value))
    return problems


def test_a_full_disk_on_rank_0_stops_all_ranks_with_the_reason(tmp_path: Path) -> None:
    found = run_in_kept_processes(_fail_on_rank_0, 2, tmp_path)
    assert found[0] == found[1]
    for problem in found[0]:
        assert problem.startswith(f"{tmp_path} cannot be written: No space left on device")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--resume auto needs --save"),
        (["--save", "none"], "--resume auto needs --save"),
        (["--save", "run", "--overwrite"], "contradict each other"),
    ],
)
def test_resume_auto_needs_a_folder_to_resume(words: list[str], problem: str) -> None:
    (found,) = find_problems(parse_arguments(["--resume", "auto", *words]))
    assert problem in found


def test_left_over_staging_folders_are_removed_at_the_next_start(tmp_path: Path) -> None:
    staging, old = ".rapidformer-staging-", ".rapidformer-old-"
    for name in (staging + "iter_0000004", staging + "best", old + "last", ".old-notes"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{staging}metrics.jsonl").write_text("half")
    shutil.copytree(tmp_path / f"{staging}best", tmp_path / f"{old}best")
    train(tmp_path)
    assert [name for name in get_names(tmp_path) if name.startswith((staging, old))] == []
    assert (tmp_path / ".old-notes").is_dir(), "the user's own"
