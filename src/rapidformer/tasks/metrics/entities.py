"""Entity F1: an entity counts if both its boundaries and its type are right.

The rules are those of CoNLL's evaluation script, which seqeval's default mode follows: tags are
accepted where a strict reading would forbid them (an I- after O begins an entity). IOB1, IOB2 and
IOBES all work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def compute_entities(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Precision, recall and F1 of entities, and the accuracy of tags."""
    right = found = wanted = 0
    for predicted, expected in zip(predictions, labels, strict=True):
        guesses, truths = set(find_entities(predicted)), set(find_entities(expected))
        right += len(guesses & truths)
        found += len(guesses)
        wanted += len(truths)
    precision = right / found if found else 0.0
    recall = right / wanted if wanted else 0.0
    both = precision + recall
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / both if both else 0.0,
        "accuracy": compute_tag_accuracy(predictions, labels),
    }


def compute_tag_accuracy(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> float:
    """The fraction of tags that are right, over all sentences."""
    hits = total = 0
    for predicted, expected in zip(predictions, labels, strict=True):
        hits += sum(p == e for p, e in zip(predicted, expected, strict=True))
        total += len(expected)
    return hits / total if total else 0.0
