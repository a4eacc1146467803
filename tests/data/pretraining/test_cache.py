"""The cache of index maps: built once, believed only when whole."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer.data.pretraining import cache
from rapidformer.data.pretraining.cache import IndexCache, IndexMaps
from rapidformer.errors import DataError
from tests.processes import wait_until

ARRAYS = {"rows": np.arange(60, dtype=np.uint32).reshape(20, 3), "order": np.arange(5)[::-1]}


class Builder:
    """Says how often it was asked."""

    def __init__(self, arrays: Mapping[str, np.ndarray] = ARRAYS) -> None:
        self.calls = 0
        self.arrays = arrays

    def __call__(self) -> Mapping[str, np.ndarray]:
        self.calls += 1
        return self.arrays


def load(folder: Path, build: Callable[[], Any], **description: Any) -> IndexMaps:
    return IndexCache(folder).load_or_build("test data", {"seed": 1} | description, build)


def check(maps: IndexMaps) -> None:
    assert list(maps) == ["rows", "order"]
    for name, array in ARRAYS.items():
        assert maps[name].tolist() == array.tolist()
        assert maps[name].dtype == array.dtype


def find(folder: Path, pattern: str) -> Path:
    (path,) = (folder / "index-cache").glob(pattern)
    return path


def test_maps_are_built_once_and_mapped_after(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        check(load(tmp_path, build))
    assert build.calls == 1
    record = json.loads(find(tmp_path, "test-data-*.json").read_text())
    assert record["description"] == {"format": cache.FORMAT, "seed": 1}
    assert record["arrays"]["rows"]["shape"] == [20, 3]
    assert not list((tmp_path / "index-cache").glob("*partial*"))


def test_another_description_is_another_map(tmp_path: Path) -> None:
    build = Builder()
    load(tmp_path, build)
    load(tmp_path, build, seed=2)
    load(tmp_path, build, length=3)
    assert build.calls == 3


def test_a_chosen_folder_holds_the_maps(tmp_path: Path) -> None:
    IndexCache(tmp_path / "data", tmp_path / "chosen").load_or_build("x", {}, Builder())
    assert find(tmp_path / "chosen", "x-*.json").is_file()
    assert not (tmp_path / "data").exists()


def test_pickled_maps_are_names_of_files(tmp_path: Path) -> None:
    maps = load(tmp_path, Builder({"long": np.arange(100_000)}))
    assert maps["long"][5] == 5
    pickled = pickle.dumps(maps)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)["long"].tolist() == list(range(100_000))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "pattern", "reason"),
    [
        (cut_short, "*-rows.npy", r"rows.npy has 364 of 368 bytes"),
        (flip, "*-order.npy", r"order.npy does not match what was written"),
        (Path.unlink, "*-order.npy", r"order.npy is missing"),
        (cut_short, "*.json", r"is built again: "),
        (lambda path: path.write_text("[]"), "*.json", r"its .json has another format"),
    ],
)
def test_damaged_maps_are_built_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], Any],
    pattern: str,
    reason: str,
) -> None:
    build = Builder()
    load(tmp_path, build)
    damage(find(tmp_path, pattern))
    with caplog.at_level(logging.WARNING, logger="rapidformer"):
        check(load(tmp_path, build))
    assert build.calls == 2
    assert reason in caplog.text
    check(load(tmp_path, build))
    assert build.calls == 2


def test_a_folder_that_cannot_be_written_to_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "index-cache").write_text("a file in the way")
    with caplog.at_level(logging.INFO, logger="rapidformer"):
        check(load(tmp_path, Builder()))
    assert "cannot be kept in" in caplog.text
    assert "--data-cache-path chooses another" in caplog.text
    assert find(tmp_path / "user" / "rapidformer", "test-data-*.json").is_file()


def test_no_folder_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        DataError, match=r"cannot be kept in .* or .*: give a folder .*--data-cache"
    ):
        load(tmp_path / "file", Builder())
    with pytest.raises(DataError, match="--data-cache-path"):
        IndexCache(tmp_path, tmp_path / "file").load_or_build("x", {}, Builder())


def test_a_lock_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    load(tmp_path, Builder())
    find(tmp_path, "*.json").unlink()
    lock = find(tmp_path, "*.lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(DataError, match=r"the lock of an index map, .*--data-cache-path"):
        load(tmp_path, Builder())


def test_a_full_disk_leaves_nothing_that_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any, array: np.ndarray, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", fail)
        with pytest.raises(DataError, match=r"written \(No space left on device\): free"):
            load(tmp_path, Builder())
    assert not list((tmp_path / "index-cache").glob("*.npy*"))
    check(load(tmp_path, Builder()))


def test_a_file_system_without_locks_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    check(load(tmp_path, Builder()))


# --- several processes ---------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
from rapidformer.data.pretraining.cache import IndexCache

folder = Path(sys.argv[1])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def build():
    with (folder / "builds.txt").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    wait_for("finish")
    return {"rows": np.arange(60, dtype=np.uint32).reshape(20, 3), "order": np.arange(5)[::-1]}

wait_for("go")
(folder / f"here-{os.getpid()}").touch()
maps = IndexCache(folder).load_or_build("test data", {"seed": 1}, build)
print(int(maps["rows"].sum()))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """It begins when ``go`` is in the folder, and has built when ``finish`` is."""
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)


def is_building(folder: Path) -> bool:
    return (folder / "builds.txt").exists()


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(3)]
    (tmp_path / "go").touch()
    wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 3 and is_building(tmp_path))
    (tmp_path / "finish").touch()
    outputs = [process.communicate()[0] for process in processes]
    assert outputs == ["1770\n"] * 3
    assert len((tmp_path / "builds.txt").read_text().splitlines()) == 1


def test_a_killed_builder_is_followed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    first = start(tmp_path)
    wait_until(lambda: is_building(tmp_path))
    second = start(tmp_path)
    # What a builder killed while writing would have left.
    lock = find(tmp_path, "*.lock")
    leftover = lock.with_name(f"{lock.stem}-rows.npy.partial-elsewhere-1")
    leftover.write_bytes(b"half")
    lock.with_name(f"{lock.stem}-rows.npy").write_bytes(b"half, under the final name")
    first.send_signal(signal.SIGKILL)
    first.wait()
    (tmp_path / "finish").touch()
    assert second.communicate()[0] == "1770\n"
    assert not leftover.exists()
    check(load(tmp_path, Builder()))


def test_who_waits_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "go").touch()
    other = start(tmp_path)
    wait_until(lambda: is_building(tmp_path))
    monkeypatch.setattr(cache, "_SECONDS_BEFORE_SAYING", 0.0)
    build = Builder()

    def finish(record: logging.LogRecord) -> bool:
        """The other process builds until this one has said that it waits."""
        (tmp_path / "finish").touch()
        return True

    with caplog.at_level(logging.WARNING, logger="rapidformer"), caplog.filtering(finish):
        check(load(tmp_path, build))
    assert build.calls == 0
    assert "for the index map of the test data, which process" in caplog.text
    assert f"-{other.pid} is building" in caplog.text
    other.communicate()
