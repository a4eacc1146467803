"""The finished parts of a run: their names in the work folder, and what each part holds."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rapidformer.data.preprocess.problems import ProblemLog
from rapidformer.data.preprocess.reading import Position

_READ_AT_ONCE = 1 << 22


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
        content = {
            "number": self.number,
            "end": asdict(self.end),
            "text_bytes": self.text_bytes,
            "counts": [asdict(counts) for counts in self.counts],
            "problems": self.problems.to_json(),
            "files": self.files,
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> PartReport:
        content = json.loads(text)
        return cls(
            number=content["number"],
            end=Position(**content["end"]),
            text_bytes=content["text_bytes"],
            counts=[KeyCounts(**counts) for counts in content["counts"]],
            problems=ProblemLog.from_json(content["problems"]),
            files=content["files"],
        )


def get_part_prefix(folder: Path, number: int, key_index: int) -> Path:
    """The files of one key of a part; keys are numbered, since a key may be any text."""
    return folder / f"{number:08d}-{key_index}"


def get_report_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"


def count_reports(folder: Path) -> int:
    """How many parts are finished."""
    return sum(1 for path in folder.glob("*.json") if path.stem.isdigit())


def compute_checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file: after a power cut, a file may have its size but no content."""
    checksum = size = 0
    with path.open("rb") as file:
        while block := file.read(_READ_AT_ONCE):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return [size, checksum]
