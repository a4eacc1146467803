"""Accuracy, F1 and Matthews correlation, for one or several labels per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What the authors of each GLUE task report; accuracy for every other dataset.
GLUE_METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation", "accuracy"),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "sst2": ("accuracy",),
    "mnli": ("accuracy",),
    "mnli_matched": ("accuracy",),
    "mnli_mismatched": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
DEFAULT_METRICS = ("accuracy", "f1")


def compute_single_label(
    predictions: Sequence[int],
    labels: Sequence[int],
    num_labels: int,
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> dict[str, float]:
    """The named metrics; F1 is that of class 1 for two classes, otherwise the mean over classes."""
    import torch
    from torchmetrics.functional import classification

    predicted = torch.as_tensor(predictions, dtype=torch.int64)
    wanted = torch.as_tensor(labels, dtype=torch.int64)
    result: dict[str, float] = {}
    for metric in metrics:
        if metric == "accuracy":
            value: Any = (predicted == wanted).double().mean()
        elif metric == "f1" and num_labels == 2:
            value = classification.binary_f1_score(predicted, wanted)
        elif metric == "f1":
            value = classification.multiclass_f1_score(
                predicted, wanted, num_classes=num_labels, average="macro"
            )
        else:
            value = classification.multiclass_matthews_corrcoef(
                predicted, wanted, num_classes=num_labels
            )
        result[metric] = float(value)
    return result


def compute_multi_label(
    predictions: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Micro and macro F1; accuracy counts the rows in which every label is right."""
    import torch
    from torchmetrics.functional import classification

    predicted = torch.as_tensor(predictions, dtype=torch.int64)
    wanted = torch.as_tensor(labels, dtype=torch.int64)
    count = wanted.shape[1]
    f1 = classification.multilabel_f1_score
    return {
        "accuracy": float((predicted == wanted).all(dim=1).double().mean()),
        "f1": float(f1(predicted, wanted, num_labels=count, average="micro")),
        "f1_macro": float(f1(predicted, wanted, num_labels=count, average="macro")),
    }
