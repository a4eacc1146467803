"""Tags of words: entities by type (boundaries and type must be right), or every tag on its own.

The rules are those of CoNLL's script and seqeval's default mode: an I- after O begins an entity;
IOB1, IOB2 and IOBES all work. seqeval itself needs scikit-learn and all sentences in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rapidformer.tasks.metrics.classification import ClassTally
from rapidformer.tasks.metrics.tally import (
    Record,
    ReportTable,
    ScoreTable,
    Tally,
    average_scores,
    score_counts,
)

Entity = tuple[str, int, int]

_BEGINS = frozenset("BS")
_ENDS = frozenset("ES")


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """(type, first, last) of every entity in one sentence."""
    entities: list[Entity] = []
    start, last_mark, last_kind = 0, "O", ""
    for position, tag in enumerate([*tags, "O"]):
        mark, kind = _split(tag)
        has_changed = kind != last_kind
        if last_mark != "O" and (
            last_mark in _ENDS or mark in _BEGINS or mark == "O" or has_changed
        ):
            entities.append((last_kind, start, position - 1))
        if mark != "O" and (
            mark in _BEGINS or last_mark == "O" or last_mark in _ENDS or has_changed
        ):
            start = position
        last_mark, last_kind = mark, kind
    return entities


def _split(tag: str) -> tuple[str, str]:
    return (tag[:1] or "O"), (tag[1:].split("-", maxsplit=1)[-1] or "_")


def has_entity_tags(names: Iterable[str]) -> bool:
    """Whether tags mark entity boundaries (B-PER, I-PER, O), unlike part-of-speech tags."""
    return all(name == "O" or name[:2] in {"B-", "I-", "E-", "S-", "L-", "U-"} for name in names)


class EntityTally(Tally):
    """Counts of entities by type, and of tags; records number a sentence's tags among ``names``."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__()
        self._names = list(names)
        self._right: Counter[str] = Counter()
        self._guessed: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._hits = self._tags = 0

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self.add_tags(
                [self._names[tag] for tag in record["guesses"]],
                [self._names[tag] for tag in record["labels"]],
            )
        self.examples += len(records)

    def add_tags(self, predicted: Sequence[str], expected: Sequence[str]) -> None:
        guesses, truths = set(find_entities(predicted)), set(find_entities(expected))
        self._right.update(kind for kind, _, _ in guesses & truths)
        self._guessed.update(kind for kind, _, _ in guesses)
        self._wanted.update(kind for kind, _, _ in truths)
        self._hits += sum(p == e for p, e in zip(predicted, expected, strict=True))
        self._tags += len(expected)

    def score(self) -> dict[str, float]:
        """Precision, recall and F1 of entities, and the accuracy of tags."""
        scores = self._score_all()
        del scores["support"]
        return {**scores, "accuracy": self._hits / self._tags if self._tags else 0.0}

    def score_types(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and support of every type of entity."""
        return {
            kind: score_counts(self._right[kind], self._guessed[kind], self._wanted[kind])
            for kind in sorted(self._guessed.keys() | self._wanted.keys())
        }

    def tables(self) -> list[ReportTable]:
        """The scores of each type of entity, as seqeval reports them."""
        rows = self.score_types()
        averages = {"micro avg": self._score_all(), **average_scores(rows.values())}
        return [ScoreTable("entities", "by entity", rows, averages)]

    def _score_all(self) -> dict[str, float]:
        return score_counts(self._right.total(), self._guessed.total(), self._wanted.total())


class TagTally(ClassTally):
    """Each tag counts by itself; even of two tags, neither is "the" positive one."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._has_positive = False

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self.add_labels(record["guesses"], record["labels"])
        self.examples += len(records)
