"""What a model that listens learns: its own loss, or CTC's, whose mean is over the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, log_softmax

from rapidformer.compat.transformers_speech import count_steps
from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.objectives import Context, Objective, Term, Terms
from rapidformer.tasks.speech.spec_augment import Masker


class OwnLoss(Objective):
    """The loss that the model computes itself, with SpecAugment's masks drawn by sample."""

    def __init__(self, *, is_stream: bool) -> None:
        self._masker, self._is_stream = Masker(), is_stream

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        with self._masker.masking(model, batch) as inputs:
            loss = Term(model(**inputs).loss)
        return {"loss": loss, **(_count_left_out(batch["labels"]) if self._is_stream else {})}


class CtcLoss(Objective):
    """The mean over the rows of the update.

    A model's own ``ctc_loss_reduction`` knows a micro-batch alone: its sum grows with the rows.
    """

    def __init__(self, reduction: str, *, is_stream: bool) -> None:
        self._reduction = reduction
        self._masker, self._is_stream = Masker(), is_stream

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        labels = batch["labels"]
        with self._masker.masking(model, batch) as inputs:
            logits = model(**{name: v for name, v in inputs.items() if name != "labels"}).logits
        steps = get_steps(model, logits, batch)
        losses = compute_row_losses(logits, labels, steps, model.config, self._reduction)
        short = (steps < count_needed_steps(labels)).to(losses.dtype)
        terms = {"too_short": Term.from_sum(short.sum(), len(losses), weight=0.0)}
        if not self._is_stream:
            return {"loss": Term.from_rows(losses), **terms}
        is_learnt = _has_labels(labels).to(losses.dtype)
        loss = Term.from_rows(losses * is_learnt, is_learnt)
        return {"loss": loss, **terms, **_count_left_out(labels)}


def _has_labels(labels: Tensor) -> Tensor:
    """Whether a row has any; a stream's row that cannot be learnt from has none."""
    return (labels.reshape(len(labels), -1) != IGNORED_LABEL).any(-1)


def _count_left_out(labels: Tensor) -> dict[str, Term]:
    """The share of rows that nothing is learnt from, to be shown."""
    left_out = (~_has_labels(labels)).float().sum()
    return {"left_out": Term.from_sum(left_out, len(labels), weight=0.0)}


def get_steps(model: Any, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """The steps of each row that are not padding."""
    mask = batch.get("attention_mask")
    steps = None if mask is None else count_steps(model, mask.sum(-1))
    if steps is None:
        steps = torch.full((len(logits),), logits.shape[1], device=logits.device)
    return steps.long().clamp(max=logits.shape[1])


def compute_row_losses(
    logits: Tensor, labels: Tensor, steps: Tensor, config: Any, reduction: str
) -> Tensor:
    """CTC's loss of each row in fp32; 0, with no gradient, for one with too few steps."""
    sizes = (labels >= 0).sum(-1)
    scores = log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    # cuDNN's is not reproducible, and does not take every shape.
    with torch.backends.cudnn.flags(enabled=False):
        losses = ctc_loss(
            scores, labels.clamp(min=0), steps, sizes, blank=config.pad_token_id,
            reduction="none", zero_infinity=True,
        )  # fmt: skip
    return losses / sizes.clamp(min=1) if reduction == "mean" else losses


def count_needed_steps(labels: Tensor) -> Tensor:
    """The fewest steps that can spell the labels: equal neighbours need a blank between them."""
    is_label = labels >= 0
    doubles = (labels[:, 1:] == labels[:, :-1]) & is_label[:, 1:]
    return is_label.sum(-1) + doubles.sum(-1)
