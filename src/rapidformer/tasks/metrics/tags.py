"""The metrics of token classification: entities by type, or the tags of words one by one."""

from __future__ import annotations

from collections.abc import Sequence

from rapidformer.tasks.metrics.classification import ClassTally
from rapidformer.tasks.metrics.entities import EntityScores, has_entity_tags
from rapidformer.tasks.metrics.tables import ReportTable
from rapidformer.tasks.metrics.tally import Record, Tally


def build_tag_tally(names: Sequence[str]) -> Tally:
    """Entities if the tags mark their boundaries (B-PER, I-PER, O), else every tag on its own."""
    return EntityTally(names) if has_entity_tags(names) else TagTally(names)


class EntityTally(Tally):
    """Records with ``guesses`` and ``labels``, the numbers of a sentence's tags."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = list(names)
        self._scores = EntityScores()

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self._scores.add(
                [self._names[tag] for tag in record["guesses"]],
                [self._names[tag] for tag in record["labels"]],
            )
        self.examples += len(records)

    def score(self) -> dict[str, float]:
        return self._scores.score()

    def tables(self) -> list[ReportTable]:
        return self._scores.tables()


class TagTally(ClassTally):
    """Each tag counts by itself; even of two tags, neither is "the" positive one."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, has_positive_class=False)

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self.add_labels(record["guesses"], record["labels"])
        self.examples += len(records)
