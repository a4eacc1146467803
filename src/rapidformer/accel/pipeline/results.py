"""What the last stage returns for each micro-batch, sent to the others in one small message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rapidformer.accel.pipeline.layout import FLAG
from rapidformer.data.update import MicroBatchResult
from rapidformer.log import warn_once


class ResultMessages:
    """Losses, weights and parts of losses, from the rank of the last stage to all others."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, process: int, device: torch.device
    ) -> None:
        """``source`` has the last stage; ``process`` is this rank; both within the group."""
        self._group, self._source, self._device = group, source, device
        self._is_source = process == source
        self._names: list[str] | None = None
        """The parts of a loss: those of the first micro-batch."""

    def broadcast(self, results: Sequence[MicroBatchResult | None]) -> list[MicroBatchResult]:
        """The results of an update's micro-batches, which only the last stage has."""
        known = [result for result in results if result is not None]
        if self._names is None:
            box = [list(known[0].parts) if self._is_source else []]
            dist.broadcast_object_list(box, group=self._group, group_src=self._source)
            self._names = box[0]
        if self._is_source:
            packed = torch.stack([self._pack(result, self._names) for result in known])
        else:
            shape = len(results), 2 + 2 * len(self._names)
            packed = torch.empty(shape, dtype=torch.float64, device=self._device)
        dist.broadcast(packed, group=self._group, group_src=self._source)
        return [_unpack(row, self._names) for row in packed]

    def _pack(self, result: MicroBatchResult, names: Sequence[str]) -> Tensor:
        """A micro-batch's losses and weights as one tensor."""
        unknown = [name for name in result.parts if name not in names]
        if unknown:
            warn_once(
                f"the forward step returns {', '.join(unknown)} in some micro-batches only: with "
                f"{FLAG} only the names of the first one are reported.",
                is_local=True,
            )
        nothing = (torch.zeros(()), 0.0)
        pairs = [(result.loss, result.weight), *(result.parts.get(n, nothing) for n in names)]
        return torch.stack([self._to_double(number) for pair in pairs for number in pair])

    def _to_double(self, number: float | Tensor) -> Tensor:
        if isinstance(number, Tensor):
            return number.to(self._device, torch.float64).reshape(())
        # Not as_tensor: a copy from the host would wait for the device.
        return torch.full((), number, dtype=torch.float64, device=self._device)


def _unpack(row: Tensor, names: Sequence[str]) -> MicroBatchResult:
    (loss, weight), *pairs = [(mean, count) for mean, count in row.view(-1, 2).float()]
    parts = dict(zip(names, pairs, strict=True))
    return MicroBatchResult(loss=loss, weight=weight, parts=parts)
