"""`preprocess` killed, interrupted, out of disk: it ends cleanly, and goes on to the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rapidformer.data.preprocess import run as run_module
from rapidformer.errors import DataError
from tests.data.preprocess.rig import read_bytes, run, write_json_lines
from tests.data.preprocess.vocabularies import get_library_sources, make_gpt2_files, write_lines
from tests.processes import PATIENCE, is_alive, wait_until

KILLS = 5
LONG = 6
NAME = "out_text_document"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of some MB, a tokenizer, and what an undisturbed run makes."""
    folder = tmp_path_factory.mktemp("corpus")
    make_gpt2_files(folder)
    write_lines(folder / "in.jsonl", get_library_sources(60))
    done = _finish(_start(folder, folder / "reference", workers=1))
    assert done.returncode == 0, done.stderr
    return folder


def _start(
    corpus: Path, folder: Path, *, workers: int = 2, copies: int = 1, **options: Any
) -> subprocess.Popen[str]:
    """``copies`` of the corpus make a run long enough to be disturbed."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [
            sys.executable, "-m", "rapidformer.cli.main", "preprocess",
            "--input", *[corpus / "in.jsonl"] * copies, "--output-prefix", folder / "out",
            "--vocab-file", corpus / "vocab.json", "--merge-file", corpus / "merges.txt",
            "--append-eod", "--workers", str(workers), "--part-megabytes", "0.05",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _count_parts(folder: Path) -> int:
    return len(list((folder / f"{NAME}.parts").glob("[0-9]*.json")))


def _find_workers(process: subprocess.Popen[str]) -> list[int]:
    """Only those past exec: one stopped before it would block its parent in ``Popen``."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [int(word) for word in children.read_text().split()] if children.exists() else []
    return [number for number in found if b"preprocess.worker" in _read_command_line(number)]


def _read_command_line(number: int) -> bytes:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        return b""


def _hold_a_worker(process: subprocess.Popen[str], folder: Path, parts: int = 1) -> list[int]:
    """Stop the first of the two workers and wait until the other has made ``parts``.

    The run cannot finish without both, so it is still there for what the test does next, even on
    a machine so busy that the test itself is rarely scheduled.
    """
    wait_until(lambda: len(_find_workers(process)) == 2)
    workers = _find_workers(process)
    os.kill(workers[0], signal.SIGSTOP)
    wait_until(lambda: _count_parts(folder) >= parts)
    return workers


def _get_state(number: int) -> str:
    """The kernel's letter and the processor time used; a zombie has neither."""
    try:
        words = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else f"{words[0]} {words[11]} {words[12]}"


def _is_waiting(number: int) -> bool:
    before = _get_state(number)
    time.sleep(0.1)
    return before.startswith("S") and before == _get_state(number)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_killed_at_any_point_it_continues_to_the_same_bytes(
    corpus: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    reference = read_bytes(corpus / "reference" / NAME)
    dice = random.Random(time.time_ns())
    went_on = 0
    for _ in range(KILLS):
        before = _count_parts(tmp_path)
        process = _start(corpus, tmp_path, workers=dice.choice([1, 2]))
        started.append(process)
        wanted = before + dice.randrange(0, 20)
        wait_until(lambda: process.poll() is not None or _count_parts(tmp_path) >= wanted)  # noqa: B023
        time.sleep(dice.random() * 0.05)
        process.kill()
        done = _finish(process)
        went_on += "resuming: " in done.stderr
        if done.returncode != -signal.SIGKILL:
            # It was faster than the kill: whole, and the next one begins anew.
            assert done.returncode == 0, done.stderr
            assert read_bytes(tmp_path / NAME) == reference
        for ending in (".bin", ".idx"):
            (tmp_path / f"{NAME}{ending}").unlink(missing_ok=True)
    done = _finish(_start(corpus, tmp_path))
    assert done.returncode == 0, done.stderr
    assert read_bytes(tmp_path / NAME) == reference
    assert went_on
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{NAME}.bin", f"{NAME}.idx"]


def test_workers_of_a_killed_run_end(
    corpus: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = _start(corpus, tmp_path, copies=LONG)
    started.append(process)
    workers = _hold_a_worker(process, tmp_path)
    process.send_signal(signal.SIGSTOP)
    os.kill(workers[0], signal.SIGCONT)
    # Nobody feeds them any more: they finish what they were given, then wait for ever.
    wait_until(lambda: all(map(_is_waiting, workers)))
    assert all(map(is_alive, workers))
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_alive, workers)))


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_interrupt_ends_the_run_and_its_workers_and_says_what_is_left(
    corpus: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = _start(corpus, tmp_path, copies=LONG, start_new_session=True)
    started.append(process)
    workers = _hold_a_worker(process, tmp_path, parts=3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[0], signal.SIGCONT)  # a stopped process does not see that it is to end
    done = _finish(process)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "stopped; " in done.stderr
    assert "the same command continues from there" in done.stderr
    assert not any(map(is_alive, workers))
    done = _finish(_start(corpus, tmp_path, copies=LONG))
    assert "resuming: " in done.stderr
    data, _ = read_bytes(tmp_path / NAME)
    assert data == read_bytes(corpus / "reference" / NAME)[0] * LONG


def test_a_worker_that_is_killed_is_reported(
    corpus: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = _start(corpus, tmp_path, copies=LONG)
    started.append(process)
    os.kill(_hold_a_worker(process, tmp_path)[0], signal.SIGKILL)
    done = _finish(process)
    assert done.returncode == 1
    assert "was killed by signal 9. Usually memory ran out" in done.stderr
    assert "the same command continues from there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", ["part", "output"])
def test_a_file_that_cannot_grow_leaves_no_half_output(
    where: str, workers: int, corpus: Path, tmp_path: Path
) -> None:
    """The kernel's own limit on a file's size: it strikes in the middle of a write."""
    limit = 8_000 if where == "part" else 300_000

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = _finish(_start(corpus, tmp_path, workers=workers, preexec_fn=restrict))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot be written: the file may not grow further" in done.stderr
    assert not list(tmp_path.glob("*.bin"))
    assert not list(tmp_path.glob("*.idx"))
    if where == "output":
        assert "the same command continues from there" in done.stderr
        done = _finish(_start(corpus, tmp_path))
        assert "resuming: " in done.stderr
        assert read_bytes(tmp_path / NAME) == read_bytes(corpus / "reference" / NAME)


def test_too_little_room_for_the_output_is_reported_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2 3"}] * 50)
    usage = run_module.shutil._ntuple_diskusage(1000, 990, 10)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(run_module.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(DataError, match=r"needs 1,\d+ bytes, but only 10 are free .*continues"):
            run(tmp_path, path)
    assert run(tmp_path, path).reused_parts == 1


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out_text_document.parts cannot be written"):
        run(tmp_path / "file", path)


def test_an_input_that_vanishes_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    opened = run_module.read_parts

    def vanish(*args: Any, **options: Any) -> Any:
        path.unlink()
        return opened(*args, **options)

    monkeypatch.setattr(run_module, "read_parts", vanish)
    with pytest.raises(DataError, match=r"in.jsonl: No such file"):
        run(tmp_path, path)
