"""What a model that listens learns: its own loss, or CTC's, whose mean is over the rows.

SpecAugment is by sample: which spans of a recording are masked depends on its number alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, log_softmax

from rapidformer.compat.transformers_speech import RowMasks, count_steps
from rapidformer.data.batch import IGNORED_LABEL, get_host_copy
from rapidformer.data.collate import PadCollator
from rapidformer.data.random_numbers import get_sample_seeds
from rapidformer.errors import ModelError
from rapidformer.objectives import Context, Objective, Term, Terms

if TYPE_CHECKING:
    from rapidformer.config.objective_sections import SpeechArguments


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


SEEDS = "mask_seeds"
"""Key of a batch: a seed for each row."""
_NAMES = (
    "apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_feature_prob",
    "mask_feature_length",
)  # fmt: skip


def get_mask_settings(config: Any, args: SpeechArguments) -> dict[str, Any]:
    """What the flags change in the model's configuration."""
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    missing = [name for name in given if not hasattr(config, name)]
    if missing:
        flag = missing[0].replace("_", "-")
        raise ModelError(f"--{flag}: {config.model_type} models have no SpecAugment. Leave it out.")
    return given


def masks_time(config: Any) -> bool:
    """Whether spans of time are masked in training."""
    return bool(_is_on(config) and getattr(config, "mask_time_prob", 0))


def masks_anything(config: Any) -> bool:
    """Whether anything is masked in training."""
    return masks_time(config) or bool(_is_on(config) and getattr(config, "mask_feature_prob", 0))


def _is_on(config: Any) -> bool:
    return bool(getattr(config, "apply_spec_augment", False))


class AudioCollator(PadCollator):
    """Pads as the feature extractor does, and gives each row the seed of its masks."""

    def __init__(self, extractor: Any, *, has_seeds: bool) -> None:
        padding = extractor.padding_value
        super().__init__(dict.fromkeys(("input_values", "input_features"), padding))
        self._has_seeds = has_seeds

    def __call__(self, rows: list[Any]) -> Any:
        batch = super().__call__(rows)
        if self._has_seeds:
            states = [np.random.SeedSequence(seed) for seed in get_sample_seeds(len(rows))]
            seeds = [int(state.generate_state(1, np.uint64)[0] >> 1) for state in states]
            # As a column: the host keeps a copy of those, and the masks are drawn there.
            batch[SEEDS] = torch.tensor(seeds)[:, None]
        return batch


class Masker:
    """Calls a model so that each row of a batch is masked by its own seed."""

    def __init__(self) -> None:
        self._masks: RowMasks | None = None

    @contextmanager
    def masking(self, model: Any, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the model's inputs."""
        inputs = {name: value for name, value in batch.items() if name != SEEDS}
        if SEEDS not in batch:
            yield inputs
            return
        if self._masks is None:
            self._masks = RowMasks(model)
            if self._masks.problem:
                raise ModelError(
                    f"SpecAugment cannot be drawn by sample: {self._masks.problem}. Turn it off "
                    "with --no-apply-spec-augment."
                )
        seeds = get_host_copy(batch[SEEDS]).flatten().tolist()
        with self._masks.drawing(seeds, _count_steps(model, batch)):
            yield inputs


def _count_steps(model: Any, batch: Mapping[str, Any]) -> list[int] | None:
    """The steps of each row that are not padding, if time is masked and the model says."""
    mask = batch.get("attention_mask")
    if mask is None or not masks_time(model.config):
        return None
    steps = count_steps(model, get_host_copy(mask).sum(-1))
    return None if steps is None else steps.tolist()


def drop_seeds(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch for a model that is evaluated: nothing is masked then."""
    return {name: value for name, value in batch.items() if name != SEEDS}
