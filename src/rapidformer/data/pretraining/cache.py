"""Files on disk that one process builds and all read, named by what they were built from.

Index maps are such files, and so are the tokenised rows of fine-tuning tasks. A file's name is a
hash of everything that decides its content, so it is never stale: other data or settings have
another name. There is no collective here. Processes meet at a file lock, which the kernel releases
when its holder dies. The files are published by renaming; the ``.json`` next to them comes last and
holds their hashes, and only that makes them valid.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from rapidformer.data.file_lock import try_lock
from rapidformer.data.files import hash_file
from rapidformer.errors import DataError
from rapidformer.log import get_logger

FORMAT = 1
"""Incremented when the arithmetic of any map changes, so that older files are not found."""
_POLL_SECONDS = 0.1
_SECONDS_BEFORE_SAYING = 5.0
_SECONDS_BETWEEN_SAYING = 60.0

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
        folders = [data_folder, _get_user_folder()]
        if data_cache_path is not None:
            folders = [Path(data_cache_path).expanduser()]
        self._folders = [folder / "index-cache" for folder in folders]

    def load_or_build(self, what: str, description: Mapping[str, Any], build: Build) -> IndexMaps:
        """The maps for a description; ``what`` names what is being waited for."""
        described = {"format": FORMAT, **description}
        text = json.dumps(described, sort_keys=True)
        stem = f"{what.replace(' ', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        for folder in self._folders:
            maps = _Entry(folder / stem, self.noun).load()
            if maps is not None:
                return maps
        entry = _Entry(self._choose_folder() / stem, self.noun)
        return entry.build_or_wait(build, {"what": what, "description": described})

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
        self._folders = [_get_user_folder() / "tokenized"]

    def is_usable(self) -> bool:
        """Whether something can be kept there."""
        with suppress(DataError):
            return bool(self._choose_folder())
        return False


def _get_user_folder() -> Path:
    """The user's folder for what can be computed again."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return home / "rapidformer"


def _name_of_process() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class _Entry:
    """The files of one description, whose names begin alike."""

    stem: Path
    noun: str

    @property
    def record(self) -> Path:
        """What tells that the others are complete."""
        return Path(f"{self.stem}.json")

    def load(self) -> IndexMaps | None:
        """The maps, if they are there and complete."""
        try:
            kept = json.loads(self.record.read_text(encoding="utf-8"))["arrays"]
            return IndexMaps({name: self._check(file) for name, file in kept.items()})
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = str(error)
        except (LookupError, TypeError, AttributeError):
            reason = "its .json has another format"
        get_logger().warning("the %s %s is built again: %s", self.noun, self.stem, reason)
        return None

    def _check(self, kept: Mapping[str, Any]) -> Path:
        path = self.stem.with_name(kept["file"])
        if not path.is_file():
            raise ValueError(f"{path.name} is missing")
        if path.stat().st_size != kept["bytes"]:
            raise ValueError(f"{path.name} has {path.stat().st_size} of {kept['bytes']} bytes")
        if hash_file(path) != kept["sha256"]:
            raise ValueError(f"{path.name} does not match what was written")
        return path

    def build_or_wait(self, build: Build, record: dict[str, Any]) -> IndexMaps:
        waited_since = time.monotonic()
        say_at = waited_since + _SECONDS_BEFORE_SAYING
        lock = Path(f"{self.stem}.lock")
        while True:
            with _open_lock(lock) as file:
                is_mine = try_lock(file)
                maps = self.load()
                if maps is None and is_mine is not False:  # without locks, everybody builds
                    if is_mine:
                        file.truncate(0)
                        file.write(_name_of_process())
                        file.flush()
                        # What a killed builder left, and the record of damaged maps, so that
                        # others wait. The holder of the lock knows that nobody writes these files.
                        leftovers = self.stem.parent.glob(f"{self.stem.name}*.partial-*")
                        for leftover in (*leftovers, self.record):
                            leftover.unlink(missing_ok=True)
                    maps = self._build(build, record)
            if maps is not None:
                return maps
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + _SECONDS_BETWEEN_SAYING
                holder = "another process"
                with suppress(OSError):
                    holder = f"process {lock.read_text(encoding='utf-8')}"
                get_logger().warning(
                    "waiting for %.0f s for the %s of the %s, which %s is building: %s",
                    time.monotonic() - waited_since, self.noun, record["what"], holder, lock,
                )  # fmt: skip
            time.sleep(_POLL_SECONDS)

    def _build(self, build: Build, record: dict[str, Any]) -> IndexMaps:
        start, kept, files = time.monotonic(), {}, dict[str, Path]()
        write: Write
        for name, content in build().items():
            if isinstance(content, np.ndarray):
                path, write = Path(f"{self.stem}-{name}.npy"), partial(_save_array, content)
                shape: dict[str, Any] = {"dtype": content.dtype.str, "shape": list(content.shape)}
            else:
                path, write, shape = Path(f"{self.stem}-{name}.arrow"), content, {}
            _publish(path, write)
            size, digest = path.stat().st_size, hash_file(path)
            files[name] = path
            kept[name] = {"file": path.name, "bytes": size, "sha256": digest, **shape}
        seconds, text = time.monotonic() - start, json.dumps({**record, "arrays": kept}, indent=1)
        _publish(self.record, lambda path: path.write_text(text, encoding="utf-8"))
        get_logger().info(
            "built the %s of the %s in %.1f s: %s", self.noun, record["what"], seconds, self.stem
        )
        return IndexMaps(files)


def _open_lock(path: Path) -> IO[str]:
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        # For example another user's, in a shared folder.
        raise DataError(
            f"the lock of an index map, {path}, cannot be opened ({error.strerror or error}): "
            "remove it if nobody is building that map, or choose another folder with "
            "--data-cache-path."
        ) from error


def _save_array(array: np.ndarray, target: Path) -> None:
    with target.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _publish(path: Path, write: Write) -> None:
    """Write under a temporary name, then rename: no incomplete file ever has the final name."""
    partial_file = path.with_name(f"{path.name}.partial-{_name_of_process()}")
    try:
        write(partial_file)
        partial_file.replace(path)
    except OSError as error:
        partial_file.unlink(missing_ok=True)
        raise DataError(
            f"the file {path} cannot be written ({error.strerror or error}): free some space, or "
            "choose another folder with --data-cache-path (XDG_CACHE_HOME for tokenised rows)."
        ) from error
