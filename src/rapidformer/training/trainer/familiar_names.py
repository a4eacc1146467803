"""Names of transformers' ``Trainer`` that overridden methods copy from its source."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class FamiliarNames:
    """What these names mean here; none of them needs to be overridden."""

    model: nn.Module
    _is_training: bool

    label_smoother = None
    """The loop smooths labels itself (``label_smoothing_factor``)."""
    current_gradient_accumulation_steps = 1
    """Do not divide the loss of a micro-batch: the loop weights each by its labels."""
    model_accepts_loss_kwargs = False

    @property
    def model_wrapped(self) -> nn.Module:
        """The model: nothing is ever wrapped."""
        return self.model

    @property
    def is_in_train(self) -> bool:
        return self._is_training

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Batches are on the device already."""
        return inputs

    def compute_loss_context_manager(self) -> AbstractContextManager[None]:
        """The model runs in the precision of the run by itself."""
        return nullcontext()
