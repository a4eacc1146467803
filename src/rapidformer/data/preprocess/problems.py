"""Lines that could not be used: how many, why, and where the first ones are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FIRST_SHOWN = 10


@dataclass
class Problem:
    """One reason: its number of lines, and the first of them as (file number, line, detail)."""

    count: int = 0
    first: list[tuple[int, int, str]] = field(default_factory=list)


class ProblemLog:
    """Problems by reason; a log keeps only the first lines of each."""

    def __init__(self) -> None:
        self.by_reason: dict[str, Problem] = {}

    def add(self, reason: str, source: int, line: int, detail: str = "") -> None:
        problem = self.by_reason.setdefault(reason, Problem())
        problem.count += 1
        if len(problem.first) < FIRST_SHOWN:
            problem.first.append((source, line, detail))

    @property
    def count(self) -> int:
        return sum(problem.count for problem in self.by_reason.values())

    def get_first(self) -> tuple[int, int, str, str] | None:
        """The very first bad line: file number, line, reason, detail."""
        found = [
            (source, line, reason, detail)
            for reason, problem in self.by_reason.items()
            for source, line, detail in problem.first
        ]
        return min(found, default=None)

    def merge(self, others: Iterable[ProblemLog]) -> None:
        """Add what parts have found, in part order."""
        for other in others:
            for reason, problem in other.by_reason.items():
                mine = self.by_reason.setdefault(reason, Problem())
                mine.count += problem.count
                mine.first = (mine.first + problem.first)[:FIRST_SHOWN]

    def to_json(self) -> dict[str, Any]:
        return {
            reason: {"count": problem.count, "first": problem.first}
            for reason, problem in self.by_reason.items()
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ProblemLog:
        log = cls()
        for reason, entry in content.items():
            first = [(int(source), int(line), str(text)) for source, line, text in entry["first"]]
            log.by_reason[reason] = Problem(int(entry["count"]), first)
        return log
