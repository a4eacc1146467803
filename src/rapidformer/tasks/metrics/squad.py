"""Exact match and F1 of answers, in percent, by SQuAD's rules (both of its versions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def compute_squad(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Scores over all questions; an empty answer is right if the question has no answer."""
    from torchmetrics.functional.text import squad

    answers = [{"id": str(i), "prediction_text": text} for i, text in enumerate(predictions)]
    # An unanswerable question is scored as if its answer were the empty string.
    wanted: list[Any] = [
        {"id": str(i), "answers": {"text": list(texts) or [""], "answer_start": [0]}}
        for i, texts in enumerate(references)
    ]
    scores = squad(answers, wanted)
    result = {name: float(scores[name]) for name in ("exact_match", "f1")}
    for kind, is_kind in (("has_answer", True), ("no_answer", False)):
        chosen = [i for i, texts in enumerate(references) if bool(texts) is is_kind]
        if 0 < len(chosen) < len(references):
            part = squad([answers[i] for i in chosen], [wanted[i] for i in chosen])
            result |= {f"{kind}_{name}": float(part[name]) for name in ("exact_match", "f1")}
    return result
