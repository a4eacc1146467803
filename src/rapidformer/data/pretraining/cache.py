"""Files on disk that one process builds and all read, named by what they were built from.

Index maps are such files, and so are the tokenised rows of fine-tuning tasks. A file's name is a
hash of everything that decides its content, so it is never stale: other data or settings have
another name. There is no collective here. Processes meet at a file lock, which the kernel releases
when its holder dies. The files are published by renaming; the ``.json`` next to them comes last and
holds their hashes, and only that makes them valid.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rapidformer.data.files import hash_file
from rapidformer.errors import DataError
from rapidformer.log import get_logger

FORMAT = 1
"""Incremented when the arithmetic of any map changes, so that older files are not found."""
_POLL_SECONDS = 0.1
_SECONDS_BEFORE_SAYING = 5.0
_SECONDS_BETWEEN_SAYING = 60.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

Write = Callable[[Path], Any]
Build = Callable[[], Mapping[str, np.ndarray | Write]]
"""Returns arrays by name, or functions that write a file."""


class IndexMaps(Mapping[str, np.ndarray]):
    """Arrays mapped from their files. Pickling stores only the file names."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = {name: path.absolute() for name, path in files.items()}
        self._arrays: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            # As a plain array: numpy's memmap class makes each lookup several times slower.
            mapped = np.load(self._files[name], mmap_mode="r", allow_pickle=False)
            self._arrays[name] = mapped.view(np.ndarray)
        return self._arrays[name]

    def get_file(self, name: str) -> Path:
        """Where something that is not an array lies."""
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getstate__(self) -> dict[str, Path]:
        return self._files

    def __setstate__(self, files: dict[str, Path]) -> None:
        self._files, self._arrays = files, {}


class IndexCache:
    """Where maps are stored: ``index-cache`` in the given folder, or next to the data."""

    noun = "index map"

    def __init__(self, data_folder: Path, data_cache_path: str | Path | None = None) -> None:
        if data_cache_path is not None:
            self._folders = [Path(data_cache_path).expanduser() / "index-cache"]
        else:
            self._folders = [data_folder / "index-cache", get_user_folder() / "index-cache"]

    def load_or_build(self, what: str, description: Mapping[str, Any], build: Build) -> IndexMaps:
        """The maps for a description; ``what`` names what is being waited for."""
        described = {"format": FORMAT, **description}
        text = json.dumps(described, sort_keys=True)
        stem = f"{what.replace(' ', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        for folder in self._folders:
            maps = _load(folder, stem, self.noun)
            if maps is not None:
                return maps
        folder = self._choose_folder()
        return _build_or_wait(folder, stem, what, described, build, self.noun)

    def _choose_folder(self) -> Path:
        reasons = []
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f".probe-{_name_of_process()}"
                probe.touch()
                probe.unlink()
            except OSError as error:
                reasons.append(f"{folder} ({error.strerror or error})")
                continue
            if reasons:
                get_logger().info(
                    "the index maps cannot be kept in %s: they go to %s; --data-cache-path chooses "
                    "another folder, which all nodes should share.",
                    " or ".join(reasons), folder,
                )  # fmt: skip
            return folder
        raise DataError(
            f"the index maps cannot be kept in {' or '.join(reasons)}: give a folder that can be "
            "written to with --data-cache-path."
        )


class RowCache(IndexCache):
    """Where tokenised rows are stored: in the user's cache folder."""

    noun = "cache"

    def __init__(self) -> None:
        self._folders = [get_user_folder() / "tokenized"]

    def is_usable(self) -> bool:
        """Whether something can be kept there."""
        try:
            self._choose_folder()
        except DataError:
            return False
        return True


def get_user_folder() -> Path:
    """The user's folder for what can be computed again."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return home / "rapidformer"


def _name_of_process() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _load(folder: Path, stem: str, noun: str) -> IndexMaps | None:
    """The maps of that name, if they are there and complete."""
    try:
        record = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        get_logger().warning("the %s %s/%s.json is built again: %s", noun, folder, stem, error)
        return None
    problem = _find_damage(folder, record)
    if problem is not None:
        get_logger().warning("the %s %s/%s is built again: %s", noun, folder, stem, problem)
        return None
    return IndexMaps({name: folder / kept["file"] for name, kept in record["arrays"].items()})


def _find_damage(folder: Path, record: Any) -> str | None:
    try:
        for kept in record["arrays"].values():
            path = folder / kept["file"]
            if not path.is_file():
                return f"{path.name} is missing"
            if path.stat().st_size != kept["bytes"]:
                return f"{path.name} has {path.stat().st_size} of {kept['bytes']} bytes"
            if hash_file(path) != kept["sha256"]:
                return f"{path.name} does not match what was written"
    except (KeyError, TypeError, AttributeError):
        return "its .json has another format"
    except OSError as error:
        return f"it cannot be read ({error})"
    return None


def _build_or_wait(
    folder: Path, stem: str, what: str, description: Mapping[str, Any], build: Build, noun: str
) -> IndexMaps:
    waited_since = time.monotonic()
    say_at = waited_since + _SECONDS_BEFORE_SAYING
    lock = folder / f"{stem}.lock"
    while True:
        with _try_lock(lock) as state:
            maps = _load(folder, stem, noun)
            if maps is None and state != "taken":
                if state == "mine":
                    # What a killed builder left, and the record of damaged maps, so that others
                    # wait. The holder of the lock knows that nobody is writing these files.
                    for leftover in (*folder.glob(f"{stem}*.partial-*"), folder / f"{stem}.json"):
                        leftover.unlink(missing_ok=True)
                maps = _build(folder, stem, what, description, build, noun)
        if maps is not None:
            return maps
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + _SECONDS_BETWEEN_SAYING
            holder = "another process"
            with suppress(OSError):
                holder = f"process {lock.read_text(encoding='utf-8')}"
            get_logger().warning(
                "waiting for %.0f s for the %s of the %s, which %s is building: %s",
                time.monotonic() - waited_since, noun, what, holder, lock,
            )  # fmt: skip
        time.sleep(_POLL_SECONDS)


@contextmanager
def _try_lock(path: Path) -> Iterator[Literal["mine", "taken", "none"]]:
    """Holds the lock; on a file system without locks, everybody builds."""
    try:
        lock = path.open("a+", encoding="utf-8")
    except OSError as error:
        # For example another user's, in a shared folder.
        raise DataError(
            f"the lock of an index map, {path}, cannot be opened ({error.strerror or error}): "
            "remove it if nobody is building that map, or choose another folder with "
            "--data-cache-path."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield "taken"
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield "none"
            return
        file.truncate(0)
        file.write(_name_of_process())
        file.flush()
        yield "mine"


def _build(
    folder: Path, stem: str, what: str, description: Mapping[str, Any], build: Build, noun: str
) -> IndexMaps:
    start = time.monotonic()
    built = build()
    files = {
        name: folder / f"{stem}-{name}.{'npy' if isinstance(content, np.ndarray) else 'arrow'}"
        for name, content in built.items()
    }
    kept = {
        name: _save_array(files[name], content)
        if isinstance(content, np.ndarray)
        else _save_file(files[name], content)
        for name, content in built.items()
    }
    seconds = time.monotonic() - start
    record = {"what": what, "description": description, "arrays": kept}
    text = json.dumps(record, indent=1).encode()
    _publish(folder / f"{stem}.json", lambda path: path.write_bytes(text))
    get_logger().info("built the %s of the %s in %.1f s: %s", noun, what, seconds, folder / stem)
    return IndexMaps(files)


def _save_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    def write(target: Path) -> None:
        with target.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())

    shape = {"dtype": array.dtype.str, "shape": list(array.shape)}
    return {**_save_file(path, write), **shape}


def _save_file(path: Path, write: Write) -> dict[str, Any]:
    _publish(path, write)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": hash_file(path)}


def _publish(path: Path, write: Write) -> None:
    """Write under a temporary name, then rename: no incomplete file ever has the final name."""
    partial = path.with_name(f"{path.name}.partial-{_name_of_process()}")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"the file {path} cannot be written ({error.strerror or error}): free some space, or "
            "choose another folder with --data-cache-path (XDG_CACHE_HOME for tokenised rows)."
        ) from error
