"""The folder of a run: nobody's work is written over, and metrics.jsonl tells the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rapidformer.checkpoint.store import TRACKER
from rapidformer.engine.metrics_file import METRICS_FILE, MetricsFile
from rapidformer.errors import CheckpointError
from rapidformer.training.run_folder import check_run_folder


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with a finished run, and a file that is the user's own."""
    for name in ("iter_0000001", "iter_0000002", "best", "last", "tensorboard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    (tmp_path / TRACKER).write_text("2")
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def get_content(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_new_and_empty_folders_are_fine(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "new", source=None, continues=True, overwrite=False)
    check_run_folder(tmp_path, source=None, continues=True, overwrite=False)
    assert get_content(tmp_path) == set()


def test_folder_with_files_of_the_users_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    check_run_folder(tmp_path, source=None, continues=True, overwrite=False)


@pytest.mark.parametrize("name", [METRICS_FILE, "iter_0000005"])
def test_folder_of_another_run_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    if name == METRICS_FILE:
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    before = get_content(tmp_path)
    with pytest.raises(CheckpointError, match=r"already holds a run.*--load .*--overwrite"):
        check_run_folder(tmp_path, source=None, continues=True, overwrite=False)
    assert get_content(tmp_path) == before


def test_resuming_a_run_in_its_own_folder(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = get_content(used)
    check_run_folder(used, source=used, continues=True, overwrite=False)
    check_run_folder(used, source=used / "iter_0000001", continues=True, overwrite=False)
    check_run_folder(used, source=used / "iter_0000001", continues=True, overwrite=True)
    monkeypatch.chdir(used.parent)
    check_run_folder(Path(used.name), source=used / "iter_0000001", continues=True, overwrite=False)
    assert get_content(used) == before


def test_resuming_another_run_into_this_folder_is_refused(used: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds a run"):
        check_run_folder(
            used, source=tmp_path / "other" / "iter_0000001", continues=True, overwrite=False
        )


def test_overwriting_removes_the_run_and_nothing_else(used: Path) -> None:
    check_run_folder(used, source=None, continues=True, overwrite=True)
    assert get_content(used) == {"notes.txt"}


# ---- metrics.jsonl -----------------------------------------------------------------------------


def write_lines(folder: Path, steps: list[int]) -> None:
    lines = [json.dumps({"step": step, "loss": float(step)}) for step in steps]
    (folder / METRICS_FILE).write_text("\n".join(lines) + "\n")


def read_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_one_object_a_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "deep" / "run")
    file.write({"step": 1, "loss": 0.5})
    file.write({"step": 2, "eval_accuracy": 1.0, "note": "ü\n"})
    lines = (tmp_path / "deep" / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "eval_accuracy": 1.0, "note": "ü\n"},
    ]


def test_resumed_run_takes_out_the_steps_that_it_will_do_again(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2, 2, 3, 4])
    file = MetricsFile(tmp_path, resume_step=2)
    assert read_steps(tmp_path) == [1, 2, 2]
    file.write({"step": 3})
    assert read_steps(tmp_path) == [1, 2, 2, 3]


def test_line_cut_off_by_a_crash_goes_too(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    MetricsFile(tmp_path, resume_step=2).write({"step": 3})
    assert read_steps(tmp_path) == [1, 2, 3]


def test_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2])
    MetricsFile(tmp_path).write({"step": 1})
    assert read_steps(tmp_path) == [1]


def test_resuming_into_a_folder_without_a_file(tmp_path: Path) -> None:
    MetricsFile(tmp_path, resume_step=5).write({"step": 6})
    assert read_steps(tmp_path) == [6]


def test_nothing_but_json_is_written_even_for_numbers_that_are_none(tmp_path: Path) -> None:
    """`NaN` is no JSON: jq and JavaScript refuse the whole line."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    MetricsFile(tmp_path).write({"step": 1, "eval_loss": float("nan"), "x": float("inf")})
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["step"] == 1


def test_finetuning_from_a_run_into_itself_is_refused(tmp_path: Path) -> None:
    """``--overwrite`` would delete the weights before they are read."""
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(CheckpointError, match="choose another folder"):
        check_run_folder(tmp_path, source=tmp_path, continues=False, overwrite=True)
    assert (tmp_path / "iter_0000001").is_dir()
