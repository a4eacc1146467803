"""Publish a folder completely or not at all.

Everything is written to a staging folder, listed in a manifest with its sizes, flushed to disk and
then renamed: a crash at any moment leaves the old folder or the new one, never half of one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rapidformer.errors import CheckpointError

MANIFEST = "manifest.json"
# Whatever has these names at the start of a run is deleted, so nobody else may use them.
_STAGING_PREFIX = ".rapidformer-staging-"
_RETIRED_PREFIX = ".rapidformer-old-"


def start_staging(target: Path) -> Path:
    """An empty folder beside the target, to write into."""
    staging = target.with_name(_STAGING_PREFIX + target.name)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def get_staging(target: Path) -> Path:
    """The staging folder that rank 0 created."""
    return target.with_name(_STAGING_PREFIX + target.name)


def publish(target: Path, *, with_manifest: bool = True) -> None:
    """Rename the staged folder; an older one of that name is moved away at the last moment."""
    staging = get_staging(target)
    if with_manifest:
        files = {
            str(path.relative_to(staging)): {"size": path.stat().st_size, "sha256": _hash(path)}
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        }
        (staging / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
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


def remove_leftovers(folder: Path) -> None:
    """Clean up after a run that was killed while it wrote; only for the holder of the lock."""
    for path in folder.glob(_RETIRED_PREFIX + "*"):
        target = path.with_name(path.name.removeprefix(_RETIRED_PREFIX))
        # Killed between two renames: the old folder is the only complete one.
        path.rename(target) if not target.exists() else shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(_STAGING_PREFIX + "*"):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def check_manifest(folder: Path, required: Iterable[str] = ()) -> None:
    """Refuse a folder that lacks a file, or has one of a different content than was written."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{folder} is not a whole checkpoint: its {MANIFEST} is missing or unreadable."
        ) from None
    for name in required:
        if name not in expected:
            raise CheckpointError(f"{folder} is damaged: its {MANIFEST} does not list {name}.")
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder} is damaged: {name} leads out of the folder.")
        if not path.is_file():  # a named pipe is not: reading it would never end
            raise CheckpointError(f"{folder} is damaged: {name} is missing.")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes, {size} were written."
            )
        if _hash(path) != digest:
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file: reading a named pipe would never end."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is missing or unreadable.")
    return content


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    temporary = path.with_name(_STAGING_PREFIX + path.name)
    temporary.write_text(text, encoding="utf-8")
    _force_to_disk(temporary)
    temporary.replace(path)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
