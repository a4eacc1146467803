"""SpecAugment by sample: which spans of a recording are masked depends on its number alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rapidformer.compat.transformers_speech import RowMasks, count_steps
from rapidformer.data.batch import get_host_copy
from rapidformer.data.collate import PadCollator
from rapidformer.data.random_numbers import get_sample_seeds
from rapidformer.errors import ModelError

if TYPE_CHECKING:
    from rapidformer.config.objective_sections import SpeechArguments

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
