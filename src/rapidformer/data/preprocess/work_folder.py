"""The folder next to the output where finished parts wait, so that a killed run can resume.

The folder is only valid for the same input, tokenizer and settings, which its manifest records;
otherwise it is emptied, and the run says why. A lock keeps two runs from writing the same output.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from rapidformer.data.preprocess.inputs import Source
from rapidformer.data.preprocess.parts import PartReport, compute_checksum
from rapidformer.data.preprocess.reading import Position
from rapidformer.data.preprocess.settings import PreprocessSettings
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import DataError
from rapidformer.log import get_logger

_VERSION = 1
_MANIFEST = "manifest.json"
_LOCK = "lock"
_PUBLISHING = "publishing"
_REPORT_NAME = "[0-9]" * 8 + ".json"


def build_manifest(
    settings: PreprocessSettings,
    sources: list[Source],
    tokenizer: Tokenizer,
    dtype: str,
    part_bytes: int,
) -> dict[str, Any]:
    """Everything that decides what the parts hold."""
    import tokenizers

    return {
        "version": _VERSION,
        "inputs": [
            [str(source.path.absolute()), source.size, source.modified] for source in sources
        ],
        "settings": settings.describe_result(),
        "tokenizer": tokenizer.fingerprint,
        "tokenizers version": tokenizers.__version__,
        "token type": dtype,
        "part size": part_bytes,
    }


class WorkFolder:
    """Open for one run at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def open(self, manifest: dict[str, Any]) -> dict[int, PartReport]:
        """Lock the folder; returns the parts in it that this run can use, by number."""
        shutil.rmtree(self._get_retired(), ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        found = self._load_manifest()
        if found != manifest:
            if found is not None:
                get_logger().warning(
                    "The parts in %s are of another run (%s): starting over.",
                    self.path,
                    describe_difference(found, manifest),
                )
            self._empty()
            self._write(_MANIFEST, json.dumps(manifest))
            return {}
        return self._load_reports()

    def is_publishing(self, manifest: dict[str, Any]) -> bool:
        """Whether a run with this manifest was killed while it renamed the output."""
        return (self.path / _PUBLISHING).exists() and self._load_manifest() == manifest

    def start_publishing(self) -> None:
        """From here on, files under the output's names may be ours."""
        self._write(_PUBLISHING, "")

    def remove(self) -> None:
        """The output is complete. In one step, the folder stops being resumable."""
        retired = self._get_retired()
        try:
            self.path.rename(retired)
        except OSError:
            retired = self.path
        self.close()
        shutil.rmtree(retired, ignore_errors=True)

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _get_retired(self) -> Path:
        return self.path.with_name(f".{self.path.name}.done")

    def _take_lock(self) -> None:
        self._lock = (self.path / _LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise DataError(
                f"Another run is writing to {self.path}: wait for it, or choose "
                "another --output-prefix."
            ) from None
        except OSError:
            pass  # a file system without locks: the user has to keep runs apart

    def _load_manifest(self) -> dict[str, Any] | None:
        try:
            manifest: dict[str, Any] = json.loads((self.path / _MANIFEST).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return manifest

    def _load_reports(self) -> dict[int, PartReport]:
        """The complete parts; everything else in the folder was left by a dead run."""
        reports: dict[int, PartReport] = {}
        kept = {_MANIFEST, _LOCK, _PUBLISHING}
        for path in sorted(self.path.glob(_REPORT_NAME)):
            try:
                report = PartReport.from_json(path.read_text("utf-8"))
                is_whole = all(
                    compute_checksum(self.path / name) == expected
                    for name, expected in report.files.items()
                )
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if is_whole:
                reports[report.number] = report
                kept |= {path.name, *report.files}
        self._empty(kept)
        return reports

    def _empty(self, kept: set[str] | None = None) -> None:
        for path in self.path.iterdir():
            if path.name not in (kept or {_LOCK}):
                path.unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f"{os.getpid()}-{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)


def find_start(reports: dict[int, PartReport]) -> tuple[Position, int]:
    """Where the contiguous run of finished parts ends, and the number of the next part."""
    number, position = 0, Position()
    while number in reports:
        position = reports[number].end
        number += 1
    return position, number


def describe_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Describe how two manifests differ."""
    differences: list[str] = []
    for key in sorted(found.keys() | wanted.keys()):
        old, new = found.get(key), wanted.get(key)
        if old == new:
            continue
        if key == "inputs":
            differences.append(_describe_inputs(old or [], new or []))
        elif isinstance(old, dict) and isinstance(new, dict):
            differences += [
                f"{name} was {old.get(name)}, is {value}"
                for name, value in new.items()
                if old.get(name) != value
            ]
        elif key == "tokenizer":
            differences.append("another tokenizer")
        else:
            differences.append(f"{key} was {old}, is {new}")
    return "; ".join(differences)


def _describe_inputs(old: list[list[Any]], new: list[list[Any]]) -> str:
    if [entry[0] for entry in old] != [entry[0] for entry in new]:
        return "other input files"
    changed = [Path(entry[0]).name for entry in new if entry not in old]
    return f"changed since: {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}"
