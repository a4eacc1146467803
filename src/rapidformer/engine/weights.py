"""Forward steps, and what each micro-batch's mean loss weighs.

The weight is what the mean was taken over: the number that the forward step returns, or the labels
of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rapidformer.accel.unpad.on_demand import settle_all
from rapidformer.data.batch import may_be_averaged_over_tokens
from rapidformer.data.update import MicroBatch, MicroBatchResult
from rapidformer.dist.topology import Topology
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.log import warn_once
from rapidformer.optim.guard import LossScaler
from rapidformer.optim.update import UpdateClock

_UNKNOWN_WEIGHT = (
    "it is unknown how many labels this loss is a mean over, and the batch does not show it. All "
    "micro-batches get the same weight, which is exact only if they have equally many labels. Pass "
    "engine.backward(loss, weight=n), or give the DataLoader to engine.compose()."
)
_UNSURE = (
    "it is unknown which batch this loss belongs to: several were fetched or used since the last "
    "backward(). The last of them decides its weight and the end of its update. Back-propagate "
    "each loss before the model sees the next batch, or pass engine.backward(loss, weight=n)."
)
_ROW_WEIGHT = (
    "the batches have no `labels`, so micro-batches are weighted by their rows, although these "
    "differ in length. If your loss is a mean over tokens, return (loss, number of tokens) from "
    "run_forward_step, or pass engine.backward(loss, weight=n)."
)


@dataclass(eq=False)
class LossWeights:
    """Runs forward steps and weighs their losses."""

    topology: Topology
    clock: UpdateClock
    current: CurrentBatch
    scaler: LossScaler | None = None
    shifts_labels: bool = False
    """Whether the model compares each position with the next label; decides what counts."""
    _first_width: float = 0.0
    """Tokens per row of the first micro-batch, padding included."""

    def run_forward(
        self, forward: Callable[[Any], Any], micro_batch: MicroBatch
    ) -> MicroBatchResult:
        """The forward step on one micro-batch; missing counts are taken from the batch."""
        with self.current.holding(micro_batch):
            # A loss that has read padding is computed with padding here, at the latest.
            returned = settle_all(forward(micro_batch.batch))
        values = returned if isinstance(returned, tuple) else (returned, None)
        loss, weight, parts = (*values, {})[:3]
        result = self.weigh(loss, weight, micro_batch)
        means = {
            name: (mean, result.weight if count is None or micro_batch.is_filler else count)
            for name, (mean, count) in parts.items()
        }
        return replace(result, parts=means)

    def weigh(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None,
        micro_batch: MicroBatch | None,
    ) -> MicroBatchResult:
        """A mean loss with its weight: the one that was passed, or what the batch shows."""
        is_given = weight is not None
        if micro_batch is not None and micro_batch.is_filler:
            weight = 0.0
        elif weight is None:
            weight = self.count_labels(micro_batch)
        return MicroBatchResult(loss=loss, weight=weight, is_weight_given=is_given)

    def find_micro_batch(self, weight: float | torch.Tensor | None) -> MicroBatch | None:
        """What a script's own loop back-propagates the loss of, as far as can be seen."""
        micro_batch, is_sure = self.current.find_trained()
        if not is_sure and weight is None and self._weights_matter():
            warn_once(_UNSURE)
        return micro_batch

    def count_labels(self, micro_batch: MicroBatch | None) -> float:
        """How many labels a micro-batch's mean loss covers, as far as its batch shows."""
        if micro_batch is not None:
            count = micro_batch.info.count_labels(shifts_labels=self.shifts_labels)
            if count is not None:
                self._check_rows(micro_batch)
                return float(count)
        if self._weights_matter():
            warn_once(_UNKNOWN_WEIGHT)
        return 1.0

    def get_shared_unit(self, weight: float | torch.Tensor) -> float | None:
        """What ranks that add their sums count weights in; None if this one is alone."""
        if self.topology.num_replicas == 1:
            return None
        if self.scaler is None:
            return 1.0
        if self.scaler.weight_unit is None:
            self.scaler.agree_on_unit(float(weight))
        return self.scaler.weight_unit

    def _weights_matter(self) -> bool:
        """Whether an update has more than one micro-batch."""
        has_several = self.topology.num_replicas > 1 or self.clock.rounds_per_update > 1
        return has_several or self.clock.is_accumulating

    def _check_rows(self, micro_batch: MicroBatch) -> None:
        """Warn if rows of different lengths weigh the same, which is probably not intended."""
        info = micro_batch.info
        width = info.slots / info.rows
        self._first_width = self._first_width or width
        is_other = width != self._first_width and self._weights_matter()
        if is_other and may_be_averaged_over_tokens(micro_batch.batch):
            warn_once(_ROW_WEIGHT)
