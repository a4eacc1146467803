"""The finished parts of a run, and the folder next to the output where they wait.

So a killed run can resume. The folder is only valid for the same input, tokenizer and settings,
which its manifest records; otherwise it is emptied, and the run says why. A lock keeps two runs
from writing the same output.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rapidformer.data.file_lock import try_lock
from rapidformer.data.preprocess.reading import Position
from rapidformer.errors import DataError, list_first
from rapidformer.log import get_logger

FIRST_SHOWN = 10
_READ_AT_ONCE = 1 << 22
_MANIFEST = "manifest.json"
_LOCK = "lock"
_PUBLISHING = "publishing"
_REPORT_NAME = "[0-9]" * 8 + ".json"


@dataclass
class Problem:
    """One reason: its number of lines, and the first of them as (file number, line, detail)."""

    count: int = 0
    first: list[tuple[int, int, str]] = field(default_factory=list)


class ProblemLog(dict[str, Problem]):
    """Lines that could not be used, by reason; a log keeps only the first lines of each."""

    def add(self, reason: str, source: int, line: int, detail: str = "") -> None:
        self._merge(reason, Problem(1, [(source, line, detail)]))

    def merge(self, others: Iterable[ProblemLog]) -> None:
        """Add what parts have found, in part order."""
        for other in others:
            for reason, problem in other.items():
                self._merge(reason, problem)

    def _merge(self, reason: str, problem: Problem) -> None:
        total = self.setdefault(reason, Problem())
        total.count += problem.count
        total.first += problem.first[: FIRST_SHOWN - len(total.first)]

    @property
    def count(self) -> int:
        return sum(problem.count for problem in self.values())

    def get_first(self) -> tuple[int, int, str, str] | None:
        """The very first bad line: file number, line, reason, detail."""
        lines = [
            (source, line, reason, detail)
            for reason, problem in self.items()
            for source, line, detail in problem.first
        ]
        return min(lines, default=None)


@dataclass
class KeyCounts:
    """What the files of one key hold."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty: int = 0

    def add(self, other: KeyCounts) -> None:
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)


@dataclass
class PartReport:
    """The outcome of a part. ``is_stopped``: --strict met a bad line, nothing was written."""

    number: int
    end: Position
    text_bytes: int
    counts: list[KeyCounts]
    problems: ProblemLog
    files: dict[str, list[int]] = field(default_factory=dict)  # name -> size, checksum
    is_stopped: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PartReport:
        content = json.loads(text)
        problems = {
            reason: Problem(
                entry["count"], [(file, line, text) for file, line, text in entry["first"]]
            )
            for reason, entry in content.pop("problems").items()
        }
        end = Position(**content.pop("end"))
        counts = [KeyCounts(**counts) for counts in content.pop("counts")]
        return cls(end=end, counts=counts, problems=ProblemLog(problems), **content)


def get_part_prefix(folder: Path, number: int, key_index: int) -> Path:
    """The files of one key of a part; keys are numbered, since a key may be any text."""
    return folder / f"{number:08d}-{key_index}"


def get_report_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"


def compute_checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file: after a power cut, a file may have its size but no content."""
    checksum = size = 0
    with path.open("rb") as file:
        while block := file.read(_READ_AT_ONCE):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return [size, checksum]


class WorkFolder:
    """Open for one run at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._retired = path.with_name(f".{path.name}.done")
        self._lock: IO[bytes] | None = None

    def open(self, manifest: dict[str, Any]) -> dict[int, PartReport]:
        """Lock the folder; returns the parts in it that this run can use, by number."""
        shutil.rmtree(self._retired, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        before = self._load_manifest()
        if before != manifest:
            if before is not None:
                get_logger().warning(
                    "The parts in %s are of another run (%s): starting over.",
                    self.path, _describe_difference(before, manifest),
                )  # fmt: skip
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
        retired = self._retired
        try:
            self.path.rename(retired)
        except OSError:
            retired = self.path
        self.close()
        shutil.rmtree(retired, ignore_errors=True)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        self._lock = (self.path / _LOCK).open("wb")
        # Without locks, the user has to keep runs apart.
        if try_lock(self._lock) is False:
            self.close()
            raise DataError(
                f"Another run is writing to {self.path}: wait for it, or choose "
                "another --output-prefix."
            )

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


def _describe_difference(before: dict[str, Any], wanted: dict[str, Any]) -> str:
    differences: list[str] = []
    for key in sorted(before.keys() | wanted.keys()):
        old, new = before.get(key), wanted.get(key)
        if old == new:
            continue
        if key == "inputs":
            if [entry[0] for entry in old or ()] != [entry[0] for entry in new or ()]:
                differences.append("other input files")
                continue
            changed = [Path(entry[0]).name for entry in new or () if entry not in (old or ())]
            differences.append(f"changed since: {list_first(changed, 3)}")
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
