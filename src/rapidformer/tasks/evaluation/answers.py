"""Turn logits into answers: the best spans of every window, merged per question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.tasks.base import Record

if TYPE_CHECKING:
    import numpy as np
    import torch

# A score, and the first and last character of the span in the context.
Candidate = tuple[float, int, int]


def find_best_spans(
    starts: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor, count: int
) -> list[Record]:
    """Per window, the best start and end tokens inside the context, and the no-answer score."""
    import torch

    outside = mask == 0
    null = (starts[:, 0] + ends[:, 0]).cpu().numpy()
    width = min(count, starts.shape[1])
    top = []
    for logits in (starts, ends):
        values, places = logits.masked_fill(outside, -torch.inf).topk(width, dim=1)
        top.append((places.cpu().numpy(), values.cpu().numpy()))
    return [
        {
            "first": top[0][0][row],
            "first_score": top[0][1][row],
            "last": top[1][0][row],
            "last_score": top[1][1][row],
            "null": float(null[row]),
        }
        for row in range(len(null))
    ]


def compute_window_losses(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Per window, the mean cross entropy of the answer's first and its last token.

    Only real tokens compete. In the models' own loss padding does too, so it depends on the longest
    row of a batch.
    """
    is_padding = batch["attention_mask"] == 0
    first = _compare(output.start_logits, batch["start_positions"], is_padding)
    last = _compare(output.end_logits, batch["end_positions"], is_padding)
    return (first + last) / 2


def _compare(logits: torch.Tensor, places: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each row, by methods of tensors: this file must not import torch."""
    scores = logits.float().masked_fill(is_padding, float("-inf"))
    return scores.logsumexp(dim=1) - scores.gather(1, places[:, None])[:, 0]


def join_windows(
    records: Sequence[Record], windows: Any, questions: int, extras: Mapping[str, Any]
) -> list[tuple[list[Candidate], float]]:
    """Per question, its best spans over all windows (in characters), and the no-answer score."""
    longest = extras["max_answer_length"]
    found: list[list[Candidate]] = [[] for _ in range(questions)]
    null = [float("inf")] * questions
    for record, window in zip(records, windows, strict=True):
        owner = window["example"]
        null[owner] = min(null[owner], record["null"])
        scores = record["first_score"][:, None] + record["last_score"][None, :]
        lengths = record["last"][None, :] - record["first"][:, None] + 1
        found[owner] += _valid_spans(record, scores, (lengths > 0) & (lengths <= longest), window)
    count = extras["n_best"]
    return [
        (sorted(spans, key=lambda span: -span[0])[:count], none)
        for spans, none in zip(found, null, strict=True)
    ]


def choose_answer(
    candidates: tuple[list[Candidate], float], context: str, can_abstain: bool
) -> dict[str, Any]:
    """The most likely candidate of a question; an empty string if that is no answer."""
    import numpy as np

    spans, null = candidates
    scores = [score for score, _, _ in spans]
    options: list[Candidate] = list(spans)
    if can_abstain or not spans:
        options.append((null, 0, 0))
        scores.append(null)
    best = int(np.argmax(scores))
    weights = np.exp(np.array(scores) - max(scores))
    _, start, end = options[best]
    return {
        "answer": context[start:end],
        "start": start,
        "end": end,
        "score": round(float(weights[best] / weights.sum()), 6),
    }


def _valid_spans(
    record: Record, scores: np.ndarray, fits: np.ndarray, window: Mapping[str, Any]
) -> list[Candidate]:
    import numpy as np

    rows, columns = np.nonzero(fits & np.isfinite(scores))
    return [
        (
            float(scores[i, j]),
            window["starts"][record["first"][i]],
            window["ends"][record["last"][j]],
        )
        for i, j in zip(rows, columns, strict=True)
    ]
