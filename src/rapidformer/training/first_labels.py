"""A check of the first batch: a run whose labels are all ignored would train on nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rapidformer.data.update import MicroBatchResult, Update
from rapidformer.dist.collectives import gather_from_all
from rapidformer.errors import DataError


def check_first_labels(update: Update, results: Sequence[MicroBatchResult]) -> None:
    """Refuse a first update without a single label on any rank. Every rank must call this."""
    rows = sum(micro_batch.info.rows for micro_batch in update)
    # What a loss is a mean over: the labels that count.
    labels = sum(float(result.weight) for result in results)
    counts = gather_from_all((rows, labels))
    if any(rows for rows, _ in counts) and not any(labels for _, labels in counts):
        raise DataError(
            "all labels of the first batch are ignored (-100), so there is nothing to train on: "
            "check how the data set makes its labels, such as the mask of the assistant's answers. "
            "`rapidformer data show` shows the labels of a task's data."
        )
