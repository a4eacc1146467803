"""The folder of a run: nobody's work is written over, and metrics.jsonl tells the truth."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.checkpoint.finding import METRICS_FILE, RUN_FILE, TRACKER
from rapidformer.checkpoint.lock import FolderLock
from rapidformer.errors import CheckpointError
from rapidformer.training.run_folder import (
    begin_run,
    check_run_folder,
    drop_replaced,
    recover,
    restore_replaced,
)
from rapidformer.training.trackers import MetricsFile, TrackedRun


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder with a finished run, and a file that is the user's own."""
    for name in ("iter_0000001", "iter_0000002", "best", "last", "tensorboard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for name in ("iter_0000001", "iter_0000002"):
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    (tmp_path / TRACKER).write_text("2")
    wrote = ["best", "last", "tensorboard", METRICS_FILE, TRACKER]
    (tmp_path / RUN_FILE).write_text(json.dumps({"wrote": wrote}))
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def begin(folder: Path, **changes: bool) -> None:
    values = {"source": None, "continues": False, "overwrite": True, **changes}
    begin_run(folder, **values)  # type: ignore[arg-type]


def get_content(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_new_and_empty_folders_are_fine(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "new", source=None, continues=True, overwrite=False)
    check_run_folder(tmp_path, source=None, continues=True, overwrite=False)
    assert get_content(tmp_path) == set()


def test_a_run_that_failed_before_it_wrote_anything_does_not_block_its_folder(
    tmp_path: Path,
) -> None:
    begin(tmp_path, overwrite=False)
    begin(tmp_path, overwrite=False)
    assert get_content(tmp_path) == {RUN_FILE}
    (tmp_path / METRICS_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="holds a run without a checkpoint"):
        begin(tmp_path, overwrite=False)


def test_folder_with_files_of_the_users_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    check_run_folder(tmp_path, source=None, continues=True, overwrite=False)


@pytest.mark.parametrize("name", [METRICS_FILE, "iter_0000005", "best"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_wrote_is_refused_and_left_alone(
    name: str, overwrite: bool, tmp_path: Path
) -> None:
    """Another system's checkpoint has such a name too; ``--overwrite`` is only for our runs."""
    if name == METRICS_FILE:
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mp_rank_00").write_text("mine")
    before = get_content(tmp_path)
    with pytest.raises(CheckpointError, match=f"would overwrite .*{name}, which no run wrote"):
        begin(tmp_path, overwrite=overwrite)
    assert get_content(tmp_path) == before


def test_another_run_is_refused_and_left_alone(used: Path) -> None:
    before = get_content(used)
    with pytest.raises(CheckpointError, match=r"already holds a run.*--load .*--overwrite"):
        begin(used, overwrite=False)
    assert get_content(used) == before


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


# ---- --overwrite -------------------------------------------------------------------------------


def test_a_replaced_run_is_deleted_only_after_the_first_checkpoint(used: Path) -> None:
    before = get_content(used)
    begin(used)
    assert "iter_0000002" not in get_content(used)
    kept = {name.removeprefix(".replaced/") for name in get_content(used) if "file" in name}
    assert kept == {name for name in before if "file" in name}, "moved, with all of its files"
    drop_replaced(used)
    assert get_content(used) == {"notes.txt", RUN_FILE}


def test_a_run_that_fails_early_gives_the_folder_back(used: Path) -> None:
    before = get_content(used)
    begin(used)
    (used / METRICS_FILE).write_text("new")
    (used / "best").mkdir()
    restore_replaced(used)
    assert get_content(used) == before
    assert (used / METRICS_FILE).read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("killed_at", range(1, 9))
def test_a_run_killed_while_it_replaces_another_loses_nothing(
    killed_at: int, used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any rename on the way out, and again at any rename on the way back."""
    before = get_content(used)
    rename = Path.rename
    for action in (begin, recover):
        calls = 0

        def die(path: Path, target: Path) -> Path:
            nonlocal calls
            calls += 1
            if calls == killed_at:
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "rename", die)
            action(used)
            raise KeyboardInterrupt  # or right after
    recover(used)
    assert get_content(used) == before


def test_a_run_killed_after_its_first_checkpoint_has_replaced_the_other(used: Path) -> None:
    begin(used)
    (used / "iter_0000001").mkdir()
    recover(used)
    assert get_content(used) == {"notes.txt", RUN_FILE, "iter_0000001"}


def test_a_run_that_lost_its_folder_restores_nothing(used: Path) -> None:
    """Another run has taken it over, and what is there is that one's."""
    engine = RapidformerEngine(args={"save": str(used), "log_level": "error"})
    with pytest.raises(CheckpointError, match="taken over"), Finetuner(engine).holding_folder():
        begin(used)
        other = FolderLock(used)
        other.acquire()
        engine.checkpoints.hold_folder(used)
    assert (used / ".replaced" / "best").is_dir() and not (used / "best").exists()
    other.release()


# ---- metrics.jsonl -----------------------------------------------------------------------------


def write_lines(folder: Path, steps: list[int]) -> None:
    lines = [json.dumps({"step": step, "loss": float(step)}) for step in steps]
    (folder / METRICS_FILE).write_text("\n".join(lines) + "\n")


def read_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


def open_file(folder: Path, resume_step: float = 0) -> MetricsFile:
    file = MetricsFile()
    file.start(TrackedRun(folder=folder, resume_step=resume_step))
    return file


def test_one_object_a_line(tmp_path: Path) -> None:
    file = open_file(tmp_path / "deep" / "run")
    file.log({"loss": 0.5}, 1)
    file.log({"eval_accuracy": 1.0, "note": "ü\n"}, 2)
    lines = (tmp_path / "deep" / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "eval_accuracy": 1.0, "note": "ü\n"},
    ]


def test_resumed_run_takes_out_the_steps_that_it_will_do_again(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2, 2, 3, 4])
    file = open_file(tmp_path, resume_step=2)
    assert read_steps(tmp_path) == [1, 2, 2]
    file.log({}, 3)
    assert read_steps(tmp_path) == [1, 2, 2, 3]


def test_line_cut_off_by_a_crash_goes_too(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    open_file(tmp_path, resume_step=2).log({}, 3)
    assert read_steps(tmp_path) == [1, 2, 3]


def test_damage_to_the_file_does_not_stop_a_resume(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2])
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b"[" * 100_000 + b"\n" + bytes(range(256)) * 2 + b'\n{"step": 2}\n')
    open_file(tmp_path, resume_step=2).log({}, 3)
    assert read_steps(tmp_path) == [1, 2, 2, 3]


def test_a_run_that_repeats_nothing_keeps_every_line_but_damaged_ones(tmp_path: Path) -> None:
    open_file(tmp_path).log({"loss": 1.0}, None)  # a script's own line may have no step
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'\xff\n{"step": 3, "lo')
    open_file(tmp_path, resume_step=math.inf).log({}, 4)
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"loss": 1.0}, {"step": 4}]


def test_a_named_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = open_file(tmp_path)
    os.mkfifo(tmp_path / METRICS_FILE)
    file.log({}, 1)
    assert "cannot be written: No such device or address. Training continues" in caplog.text
    with pytest.raises(OSError, match=r"metrics\.jsonl is not a regular file"):
        open_file(tmp_path, resume_step=2)


def test_a_run_that_lost_its_folder_writes_no_more_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock, other = FolderLock(tmp_path), FolderLock(tmp_path)
    lock.acquire()
    file = MetricsFile()
    file.start(TrackedRun(folder=tmp_path, check_folder=lock.check))
    file.log({}, 1)
    other.acquire()  # the first was suspended for a minute
    file.log({}, 2)
    assert read_steps(tmp_path) == [1]
    assert "was taken over by another run" in caplog.text
    lock.release()
    other.release()


def test_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    write_lines(tmp_path, [1, 2])
    open_file(tmp_path).log({}, 1)
    assert read_steps(tmp_path) == [1]


def test_resuming_into_a_folder_without_a_file(tmp_path: Path) -> None:
    open_file(tmp_path, resume_step=5).log({}, 6)
    assert read_steps(tmp_path) == [6]


def test_nothing_but_json_is_written_even_for_numbers_that_are_none(tmp_path: Path) -> None:
    """`NaN` is no JSON: jq and JavaScript refuse the whole line."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    open_file(tmp_path).log({"eval_loss": float("nan"), "x": float("inf")}, 1)
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["step"] == 1


@pytest.mark.parametrize("name", [".", "iter_0000001", "best"])
def test_starting_from_a_run_that_would_be_replaced_is_refused(name: str, used: Path) -> None:
    """``--overwrite`` would move the weights away before they are read."""
    before = get_content(used)
    with pytest.raises(CheckpointError, match="would overwrite: choose another folder"):
        begin_run(used, source=used / name, continues=False, overwrite=True)
    assert get_content(used) == before
