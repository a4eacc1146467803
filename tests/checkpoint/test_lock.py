"""One run at a time writes to a folder; a dead one does not keep others out."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapidformer.checkpoint import lock as module
from rapidformer.checkpoint.lock import LOCK_FILE, FolderLock
from rapidformer.errors import CheckpointError

Start = Callable[[], Any]


def _hold(folder: Path, pipe: Any) -> None:
    FolderLock(folder).acquire()
    pipe.send("held")
    time.sleep(600)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start another process that holds the folder's lock."""
    context = multiprocessing.get_context("fork")
    processes = []

    def start_one() -> Any:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_hold, args=(tmp_path, sender), daemon=True)
        process.start()
        processes.append(process)
        assert receiver.recv() == "held"
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.05)


def pretend_elsewhere(folder: Path) -> None:
    """Let the lock's holder be on a machine whose processes cannot be seen from here."""
    path = folder / LOCK_FILE
    holder = {**json.loads(path.read_text()), "place": "another machine", "host": "far"}
    path.write_text(json.dumps(holder))


def test_a_folder_in_use_is_refused_until_its_run_is_dead(tmp_path: Path, start: Start) -> None:
    other = start()
    with pytest.raises(CheckpointError, match=f"in use by another run .process {other.pid} on "):
        FolderLock(tmp_path).acquire()
    other.kill()
    other.join()
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_process_that_got_a_dead_ones_number_does_not_count(tmp_path: Path, start: Start) -> None:
    other = start()
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": "1"}))
    FolderLock(tmp_path).acquire()
    assert other.is_alive()


def test_a_run_on_another_machine_lives_while_it_refreshes_its_lock(
    tmp_path: Path, start: Start
) -> None:
    other = start()
    pretend_elsewhere(tmp_path)
    with pytest.raises(CheckpointError, match="on far"):
        FolderLock(tmp_path).acquire()
    other.kill()
    other.join()
    an_hour_ago = time.time() - 3600
    os.utime(tmp_path / LOCK_FILE, (an_hour_ago, an_hour_ago))
    FolderLock(tmp_path).acquire()


def test_a_lock_on_another_machine_that_is_no_longer_refreshed_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STALE_SECONDS", 0.3)
    lines: list[str] = []
    monkeypatch.setattr(module, "get_logger", lambda: SimpleNamespace(info=lines.append))
    # No age is over the limit at the first look, however slow the machine is.
    ages = iter([0.0, 0.1])
    monkeypatch.setattr(FolderLock, "_measure_age", lambda lock: next(ages, 1.0))
    holder = FolderLock(tmp_path)
    holder.acquire()
    holder._is_over.set()  # its machine has crashed
    pretend_elsewhere(tmp_path)
    FolderLock(tmp_path).acquire()
    (line,) = lines
    assert line.startswith(f"waiting   {tmp_path} is locked by process {os.getpid()} on far: ")


def test_a_clock_that_is_set_forward_kills_nobody(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    pretend_elsewhere(tmp_path)
    monkeypatch.setattr(module, "_BEAT_SECONDS", 5)  # the holder's is shorter
    monkeypatch.setattr(FolderLock, "_measure_age", lambda lock: 3600.0)
    with pytest.raises(CheckpointError, match="on far"):
        FolderLock(tmp_path).acquire()


def test_a_clock_that_is_set_back_keeps_nobody_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STALE_SECONDS", 0.2)
    monkeypatch.setattr(FolderLock, "_measure_age", lambda lock: -3600.0)
    holder = FolderLock(tmp_path)
    holder.acquire()
    holder._is_over.set()  # its machine has crashed
    pretend_elsewhere(tmp_path)
    FolderLock(tmp_path).acquire()


def test_a_suspended_run_that_lost_its_folder_stops(tmp_path: Path) -> None:
    suspended, other = FolderLock(tmp_path), FolderLock(tmp_path)
    suspended.acquire()
    other.acquire()  # the same process may; another one only if the lock is stale
    with pytest.raises(CheckpointError, match="taken over by another run"):
        suspended.check()
    suspended.release()
    other.check()


def test_an_export_is_not_told_to_change_its_save_folder(tmp_path: Path) -> None:
    lock, other = (FolderLock(tmp_path / "staging", tmp_path / "out") for _ in range(2))
    lock.acquire()
    other.acquire()
    with pytest.raises(CheckpointError, match=r"out was taken over .* with another folder\.$"):
        lock.check()
    other.release()


def test_a_restart_by_the_launcher_need_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    FolderLock(tmp_path).acquire()
    pretend_elsewhere(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    FolderLock(tmp_path).acquire()


def test_torchruns_name_for_any_run_does_not_mean_the_same_run(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    start()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(CheckpointError, match="in use by another run"):
        FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_that_cannot_be_read_is_stale(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    FolderLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to: Not a directory"):
        FolderLock(tmp_path / "file" / "run").acquire()
