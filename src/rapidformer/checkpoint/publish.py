"""Publish a folder completely or not at all.

Everything is written to a staging folder, listed in a manifest with its sizes, flushed to disk and
then renamed: a crash at any moment leaves the old folder or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rapidformer.errors import CheckpointError
from rapidformer.strict_json import parse_object

MANIFEST = "manifest.json"
# Whatever has these names at the start of a run is deleted, so nobody else may use them.
STAGING_PREFIX = ".rapidformer-staging-"
_RETIRED_PREFIX = ".rapidformer-old-"
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Digest:
    """What a manifest says about a file."""

    size: int
    sha256: str


class HashedFile(io.BufferedWriter):
    """A new file, hashed while it is written; once closed, it is on disk and has its ``digest``."""

    digest: Digest

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return super().write(data)

    def __exit__(self, *reason: object) -> None:
        try:
            self.flush()
            os.fsync(self.fileno())
            self.digest = Digest(self.tell(), self._hash.hexdigest())
        finally:
            self.close()


def hash_file(path: Path, advance: Callable[[int], None] = lambda count: None) -> Digest:
    """The digest of a file that is there already; ``advance`` is called with bytes read."""
    size, digest = 0, hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            digest.update(chunk)
            advance(len(chunk))
    return Digest(size, digest.hexdigest())


def get_staging(target: Path) -> Path:
    """The staging folder that rank 0 creates."""
    return target.with_name(STAGING_PREFIX + target.name)


def start_staging(target: Path) -> Path:
    """An empty folder next to the target, to write into."""
    staging = get_staging(target)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish(
    target: Path,
    *,
    staging: Path | None = None,
    with_manifest: bool = True,
    digests: Mapping[str, Digest] | None = None,
) -> None:
    """Rename the staged folder; what is not in ``digests`` is hashed here, for the manifest."""
    staging = staging or get_staging(target)
    if with_manifest:
        _write_manifest(staging, digests or {})
    for path in staging.rglob("*"):
        _force_to_disk(path)
    _force_to_disk(staging)
    if target.exists() and _exchange(staging, target):
        retired = staging
    else:
        retired = target.with_name(_RETIRED_PREFIX + target.name)
        shutil.rmtree(retired, ignore_errors=True)
        if target.exists():
            target.rename(retired)
        staging.rename(target)
    _force_to_disk(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def withdraw(folder: Path) -> None:
    """Delete a published folder. It loses its name first: half of it must not look damaged."""
    withdrawn = get_staging(folder)
    shutil.rmtree(withdrawn, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(withdrawn)
    shutil.rmtree(withdrawn, ignore_errors=True)


def _write_manifest(staging: Path, digests: Mapping[str, Digest]) -> None:
    paths = {str(path.relative_to(staging)): path for path in sorted(staging.rglob("*"))}
    for name, digest in digests.items():
        if name not in paths or paths[name].stat().st_size != digest.size:
            raise CheckpointError(
                f"{staging} lacks {name}, which another rank has written: --save must be a folder "
                "that all nodes share."
            )
    files = {
        name: asdict(digests.get(name) or hash_file(path))
        for name, path in paths.items()
        if path.is_file()
    }
    (staging / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def remove_leftovers(folder: Path) -> None:
    """Clean up after a run that was killed while it wrote; only for the holder of the lock."""
    for path in folder.glob(_RETIRED_PREFIX + "*"):
        target = path.with_name(path.name.removeprefix(_RETIRED_PREFIX))
        # Killed between two renames: the old folder is the only complete one.
        path.rename(target) if not target.exists() else shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(STAGING_PREFIX + "*"):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def check_manifest(folder: Path, required: Iterable[str] = ()) -> None:
    """Refuse a folder that lacks a file, or has one of a different content than was written."""
    for problem in find_damage(folder, required):
        raise CheckpointError(f"{folder} is damaged: {problem}.")


def find_damage(
    folder: Path,
    required: Iterable[str] = (),
    *,
    hashes: bool = True,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """What differs from the manifest: sizes, and ``hashes``; ``advance`` gets bytes hashed."""
    try:
        expected = read_manifest(folder)
    except CheckpointError as reason:
        yield str(reason)
        return
    yield from (f"its {MANIFEST} does not list {name}" for name in required if name not in expected)
    home = folder.resolve()
    for name, (size, digest) in expected.items():
        try:
            problem = _compare_file(home, name, size, digest if hashes else None, advance)
        except OSError as reason:
            problem = f"{name} cannot be read ({reason.strerror})"
        except (ValueError, RuntimeError):  # a name with a null byte, a loop of links
            problem = f"{name!r} is not the name of a file"
        if problem is not None:
            yield problem


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that was written."""
    if (folder / MANIFEST).is_symlink():  # what it leads to may change with another checkpoint
        raise CheckpointError(f"its {MANIFEST} is a link")
    try:
        files = read_json(folder / MANIFEST)["files"]
        return {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"its {MANIFEST} is missing or unreadable") from None


def _compare_file(
    folder: Path, name: str, size: int, digest: str | None, advance: Callable[[int], None]
) -> str | None:
    path = folder / name
    if not path.resolve().is_relative_to(folder):
        return f"{name} leads out of the folder"
    if not path.is_file():  # a named pipe is not: reading it would never end
        return f"{name} is missing" + (" (it is not a regular file)" if path.exists() else "")
    if (actual := path.stat().st_size) != size:
        return f"{name} has {actual} bytes, {size} were written"
    if digest is not None and hash_file(path, advance).sha256 != digest:
        return f"{name} is not what was written"
    return None


def read_json(path: Path, *, or_nothing: bool = False) -> dict[str, Any]:
    """A JSON object from a file; one that cannot be read is an error, or empty ``or_nothing``."""
    try:
        # Only from a regular file: reading a named pipe would never end.
        content = parse_object(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        content = None
    if content is not None:
        return content
    if or_nothing:
        return {}
    raise CheckpointError(f"{path} is missing or unreadable.")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux); False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, swap = -100, 2
    return bool(rename(here, os.fsencode(first), here, os.fsencode(second), swap) == 0)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically."""
    temporary = get_staging(path)
    temporary.write_text(text, encoding="utf-8")
    _force_to_disk(temporary)
    temporary.replace(path)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
