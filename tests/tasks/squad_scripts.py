"""The rules of SQuAD's two evaluation scripts, written down without torchmetrics.

``score_version_1`` follows evaluate-v1.1.py and ``score_version_2`` follows evaluate-v2.0.py.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def score_version_1(found: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    return _average(found, wanted, _compute_f1_of_version_1)


def score_version_2(found: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    answers = [[text for text in texts if normalize(text)] or [""] for texts in wanted]
    scores = _average(found, answers, _compute_f1_of_version_2)
    for name, has_answer in (("has_answer", True), ("no_answer", False)):
        chosen = [row for row, texts in enumerate(wanted) if bool(texts) is has_answer]
        if chosen:
            part = _average(
                [found[row] for row in chosen],
                [answers[row] for row in chosen],
                _compute_f1_of_version_2,
            )
            scores |= {f"{name}_{key}": value for key, value in part.items()}
    return scores


def _average(
    found: Sequence[str], wanted: Sequence[Sequence[str]], f1: Callable[[str, str], float]
) -> dict[str, float]:
    exact = [
        max(float(normalize(text) == normalize(answer)) for answer in answers)
        for text, answers in zip(found, wanted, strict=True)
    ]
    f1s = [
        max(f1(text, answer) for answer in answers)
        for text, answers in zip(found, wanted, strict=True)
    ]
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1s) / len(f1s)}


def _compute_f1_of_version_1(found: str, wanted: str) -> float:
    guess, truth = normalize(found).split(), normalize(wanted).split()
    same = sum((Counter(guess) & Counter(truth)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(guess), same / len(truth)
    return 2 * precision * recall / (precision + recall)


def _compute_f1_of_version_2(found: str, wanted: str) -> float:
    guess, truth = normalize(found).split(), normalize(wanted).split()
    if not guess or not truth:
        return float(guess == truth)
    return _compute_f1_of_version_1(found, wanted)
