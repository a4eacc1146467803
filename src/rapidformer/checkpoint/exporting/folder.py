"""The folder of an export: it appears complete or not at all, and nothing else is overwritten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from rapidformer.checkpoint.lock import replacing
from rapidformer.checkpoint.publish import read_json
from rapidformer.errors import CheckpointError, ConfigurationError, RapidformerError, list_first

REPORT = "export.json"
"""Lists what an export wrote: only such a folder is ever replaced."""


def refuse_foreign(target: Path) -> None:
    """Refuse a folder with anything in it that no export wrote."""
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: choose a folder to export to.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    ours = read_json(target / REPORT, or_nothing=True).get("files")
    known = {REPORT, *(ours if isinstance(ours, list) else ())}
    others = sorted(name for name in list_files(target) if name not in known)
    if ours is None or others:
        shown = list_first(others, 3)
        raise ConfigurationError(
            f"{target} holds files that no export wrote ({shown}): choose another folder."
        )


def list_files(folder: Path) -> Iterator[str]:
    """The names of all files in a folder and below."""
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def staging_for(target: Path) -> Iterator[Path]:
    """A folder to write to; if something fails, nothing is left of it, and the error says why."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(target) as staging:
            yield staging
    except RapidformerError:
        raise
    except (OSError, SafetensorError) as reason:
        text = getattr(reason, "strerror", None) or str(reason).rpartition("I/O error: ")[2]
        raise CheckpointError(
            f"{target} cannot be written: {text}. Nothing was exported."
        ) from None
