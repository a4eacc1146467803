"""Losses row by row, summed in fp32: a split's loss is exact however it is cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from rapidformer.engine.evaluation import LateResults
from rapidformer.tasks.base import IGNORED_LABEL


def score_classes(
    logits: torch.Tensor, labels: torch.Tensor | None, problem_type: str
) -> Sequence[dict[str, Any]]:
    """One record per row: the logits and, if there are labels, the label and its loss."""
    logits = logits.float()
    losses = None if labels is None else _class_losses(logits, labels, problem_type)
    return LateResults(partial(_record_classes, logits, labels, losses))


def _record_classes(
    logits: torch.Tensor, labels: torch.Tensor | None, losses: torch.Tensor | None
) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"logits": row} for row in logits.cpu().numpy()]
    if labels is None or losses is None:  # both, or neither
        return records
    numbers = losses.cpu().tolist()
    for record, loss, label in zip(records, numbers, labels.cpu().numpy(), strict=True):
        record |= {"loss": loss, "count": 1, "label": label.tolist()}
    return records


def _class_losses(logits: torch.Tensor, labels: torch.Tensor, problem_type: str) -> torch.Tensor:
    if problem_type == "regression":
        return (logits.squeeze(-1) - labels.float()).square()
    if problem_type == "multi_label_classification":
        losses = functional.binary_cross_entropy_with_logits(
            logits, labels.float(), reduction="none"
        )
        return losses.mean(dim=-1)
    return functional.cross_entropy(logits, labels, reduction="none")


def score_tokens(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[list[float], list[int], list[int]]:
    """Per row: the summed loss, the number of labelled tokens, and how many of them were right."""
    sums, hits = [], []
    # One row at a time: the whole batch in fp32 would double the largest tensor.
    for row, label in zip(logits, labels, strict=True):
        row = row.float()
        sums.append(
            functional.cross_entropy(row, label, ignore_index=IGNORED_LABEL, reduction="sum")
        )
        hits.append((row.argmax(dim=-1) == label).sum())
    counts = (labels != IGNORED_LABEL).sum(dim=1)
    table = torch.stack([torch.stack(sums).double(), counts.double(), torch.stack(hits).double()])
    losses, numbers, correct = table.cpu().tolist()
    return losses, [int(n) for n in numbers], [int(n) for n in correct]


def add_token_losses(
    records: list[dict[str, Any]], logits: torch.Tensor, labels: torch.Tensor
) -> None:
    """Add the summed loss of each row, and the number of its labelled tokens."""
    losses, counts, _ = score_tokens(logits, labels)
    for record, loss, count in zip(records, losses, counts, strict=True):
        record |= {"loss": loss, "count": count}


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels shifted so that position i holds the token it predicts."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
