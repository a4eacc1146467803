"""A run without --save: it has a folder all the same, and finds it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rapidformer import get_args
from rapidformer.config import parse_arguments
from rapidformer.errors import RapidformerError
from rapidformer.training.run_folder import RUNS_VARIABLE, choose_folder
from tests.processes import run_in_kept_processes
from tests.training.test_templates import LineFinetuner, make_engine, read_lines


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "runs"))
    return tmp_path / "runs"


def choose(*words: str) -> Path:
    return Path(str(choose_folder(parse_arguments(words)).save))


def test_a_run_without_save_keeps_its_model(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "fit_line.py").touch()
    engine = make_engine(epochs=1, save=None, user_script=str(tmp_path / "fit_line.py"))
    LineFinetuner(engine).train()
    (folder,) = runs.iterdir()
    assert folder.name.startswith("fit_line-20")
    assert (folder / "best" / "model.safetensors").is_file()
    assert (folder / "last" / "model.safetensors").is_file()
    assert read_lines(folder)[-1]["step"] == 10
    assert engine.args.save == get_args().save == str(folder)


def test_save_none_keeps_nothing(runs: Path) -> None:
    LineFinetuner(make_engine(epochs=1, save="none")).train()
    assert not runs.exists()
    assert parse_arguments(["--save", "none"]).keeps_nothing
    assert not parse_arguments([]).keeps_nothing


def test_the_name_says_task_and_model(runs: Path) -> None:
    words = ("--task", "causal_lm", "--pretrained-model-name-or-path", "org/my model")
    first, second = choose(*words), choose(*words)
    assert first.name.startswith("causal_lm-my-model-20")
    assert first != second, "two runs of one second"


def test_a_resumed_run_stays_in_its_folder(runs: Path) -> None:
    LineFinetuner(make_engine(epochs=1, save=None)).train()
    (folder,) = runs.iterdir()
    LineFinetuner(make_engine(epochs=2, save=None, load=str(folder))).train()
    assert [path.name for path in runs.iterdir()] == [folder.name]
    assert read_lines(folder)[-1]["step"] == 20


def test_a_restarted_run_finds_the_folder_of_its_first_attempt(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch-1")
    first = choose()
    (first / "iter_0000005").mkdir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = choose_folder(parse_arguments([]))
    assert (again.save, again.load) == (str(first), str(first))


def test_a_run_that_cannot_begin_leaves_no_folder(runs: Path, tmp_path: Path) -> None:
    class Fails(LineFinetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            raise RapidformerError("no data")

    with pytest.raises(RapidformerError, match="no data"):
        Fails(make_engine(epochs=1, save=None)).train()
    assert not runs.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "old").mkdir()
    for name in ("mine/new", "mine/old", "other/new"):
        with pytest.raises(RapidformerError, match="no data"):
            Fails(make_engine(epochs=1, save=str(tmp_path / name))).train()
    assert not (tmp_path / "other").exists() and not (tmp_path / "mine" / "new").exists()
    assert (tmp_path / "mine" / "old").is_dir(), "a folder of the user's stays"


def _train_without_save() -> str | None:
    engine = make_engine(epochs=1, save=None)
    LineFinetuner(engine).train()
    return engine.args.save


def test_all_processes_agree_on_the_folder(runs: Path) -> None:
    first, second = run_in_kept_processes(_train_without_save, 2)
    assert first == second
    assert [str(path) for path in runs.iterdir()] == [first]
