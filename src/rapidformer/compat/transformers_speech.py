"""transformers' speech models: how many steps the audio becomes, and what SpecAugment masks.

Models draw SpecAugment's masks from NumPy's global numbers, for all rows of a batch together, so
they depend on the batch. Inside ``RowMasks.drawing``, each row is masked as if it were alone, with
random numbers of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from torch import Tensor, nn

from rapidformer.compat.patches import Entry, Patch, describe_difference

_MASKS = "_compute_mask_indices"
_WAV2VEC = "transformers.models.wav2vec2.modeling_wav2vec2"
_KNOWN = ["shape", "mask_prob", "mask_length", "attention_mask", "min_masks"]
_LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")
PRIVATE_NAMES = {
    f"{_WAV2VEC}.{_MASKS}": "SpecAugment drawn by sample",
    f"{_WAV2VEC}.Wav2Vec2PreTrainedModel.{_LENGTHS[0]}": "the steps that a CTC loss is about",
    f"transformers.models.parakeet.modeling_parakeet.ParakeetPreTrainedModel.{_LENGTHS[1]}": (
        "the steps that a CTC loss is about"
    ),
}


def count_steps(model: Any, sizes: Tensor) -> Tensor | None:
    """The steps that inputs of these sizes become; None if the model does not say."""
    for name in _LENGTHS:
        count: Callable[[Tensor], Tensor] | None = getattr(model, name, None)
        if count is not None:
            return count(sizes)
    return None


class _Draw:
    """The seeds and the steps of the rows in a model's call, and how often masks were drawn."""

    def __init__(self, seeds: Sequence[int], steps: Sequence[int] | None) -> None:
        self.seeds, self.steps, self.calls = seeds, steps, 0

    def get_sizes(self, rows: int, width: int, attention_mask: Tensor | None) -> Sequence[int]:
        """How much of each row is not padding."""
        if attention_mask is not None:
            return attention_mask.sum(-1).tolist()
        if self.steps is not None and self.calls == 0:
            return self.steps  # time comes first, and HuBERT and SEW pass no mask for it
        return [width] * rows


_CURRENT: ContextVar[_Draw | None] = ContextVar("draw", default=None)


class RowMasks:
    """SpecAugment of one model."""

    def __init__(self, model: nn.Module) -> None:
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        modules = {sys.modules.get(cls.__module__) for cls in classes}
        owners = [module for module in modules if hasattr(module, _MASKS)]
        differences = (describe_difference("transformers", o, _MASKS, _KNOWN) for o in owners)
        self.problem = next(filter(None, differences), None)
        """Why masks cannot be drawn by row, if they cannot."""
        self._patch = Patch(lambda: [Entry(owner, _MASKS, _draw_by_row) for owner in owners])

    @contextmanager
    def drawing(self, seeds: Sequence[int], steps: Sequence[int] | None) -> Iterator[None]:
        """Inside, row i of a batch is masked by seed i; ``steps`` that time is masked in."""
        token = _CURRENT.set(_Draw(seeds, steps))
        try:
            with self._patch:
                yield
        finally:
            _CURRENT.reset(token)


def _draw_by_row(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def compute(
        shape: tuple[int, int], mask_prob: float, mask_length: int,
        attention_mask: Tensor | None = None, min_masks: int = 0,
    ) -> np.ndarray:  # fmt: skip
        draw = _CURRENT.get()
        if draw is None:  # somebody else's model
            return original(shape, mask_prob, mask_length, attention_mask, min_masks)
        rows, width = shape
        sizes = draw.get_sizes(rows, width, attention_mask)
        masks, before = np.zeros(shape, dtype=bool), np.random.get_state()
        for row, (size, seed) in enumerate(zip(sizes, draw.seeds, strict=True)):
            if size < mask_length:
                continue  # too short for a single span
            state = np.random.SeedSequence((seed, draw.calls)).generate_state(1)
            np.random.seed(int(state[0]))
            masks[row, :size] = original((1, size), mask_prob, mask_length, None, min_masks)[0]
        np.random.set_state(before)
        draw.calls += 1
        return masks

    return compute
