"""The finished parts of a run: names in the work folder, what each holds and what it skipped."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rapidformer.data.preprocess.reading import Position

FIRST_SHOWN = 10
_READ_AT_ONCE = 1 << 22


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
        self.documents += other.documents
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.empty += other.empty


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
