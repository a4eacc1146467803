"""An update as a value: its micro-batches with the facts the loader knows; it never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from rapidformer.data.batch import NO_BATCH, BatchInfo, move_to_device
from rapidformer.data.nested import iterate_tensors
from rapidformer.dist.topology import Topology

Mean = tuple[torch.Tensor, float | torch.Tensor]
"""A mean and the number of things it was taken over."""


class MicroBatch(NamedTuple):
    """One forward and backward pass on one process."""

    batch: Any
    info: BatchInfo
    """Rows, labels and tokens; all zero for a filler."""
    is_filler: bool
    """Whether it only keeps this process in step with the others; its loss has no weight."""
    is_last: bool
    """Whether it ends its update."""
    epoch: int
    number: int
    """Its place among all micro-batches of the epoch, the same for any number of processes."""
    is_on_host: bool = False
    """Whether the batch still has to be moved to the device."""
    sets: tuple[int, ...] = ()
    """The data set of each sample, if the data is a mixture."""
    must_end: bool = False
    """Whether it ends its update wherever that began: the script's loop may have left out others,
    or left an earlier epoch before its end."""


@dataclass(frozen=True)
class Update:
    """The micro-batches of one optimizer step on this process."""

    micro_batches: tuple[MicroBatch, ...]
    positions: range = range(0)
    """The places of its samples in the epoch's order, over all ranks."""

    @property
    def epoch(self) -> int:
        return self.micro_batches[0].epoch

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __getitem__(self, index: int) -> MicroBatch:
        return self.micro_batches[index]


@runtime_checkable
class UpdatePreparation(Protocol):
    """A forward step that must see a whole update before its first micro-batch runs."""

    def prepare(self, update: Update, topology: Topology, device: torch.device) -> Update:
        """The update with what the step needs added to its batches."""
        ...


@dataclass(frozen=True, kw_only=True)
class MicroBatchResult:
    """What a forward pass made of a micro-batch."""

    loss: torch.Tensor
    """The mean loss."""
    weight: float | torch.Tensor
    """What the mean was taken over: labels or rows; 0 for a filler."""
    info: BatchInfo = NO_BATCH
    """Of the micro-batch that was run."""
    is_weight_given: bool = False
    """Whether the forward step said it; otherwise the labels of the batch were counted."""
    parts: Mapping[str, Mean] = field(default_factory=dict)
    """What the loss is made of, by name. Only shown, never back-propagated."""

    @property
    def means(self) -> dict[str, Mean]:
        return {**self.parts, "loss": (self.loss, self.weight)}


def read_ahead(
    rounds: Iterator[MicroBatch],
    device: torch.device,
    stays_on_host: Callable[[], bool] | None = None,
) -> Iterator[MicroBatch]:
    """The same rounds on the device, one copied ahead; if one ``stays_on_host()``, by others."""
    if device.type != "cuda":
        for micro_batch in rounds:
            if stays_on_host is not None and stays_on_host():
                yield micro_batch._replace(is_on_host=True)
            else:
                yield move_micro_batch(micro_batch, device)
        return
    copying = torch.cuda.Stream(device)
    coming: MicroBatch | None = None
    while True:
        current, coming = coming, next(rounds, None)
        if coming is not None and stays_on_host is not None and stays_on_host():
            coming = coming._replace(is_on_host=True)
        elif coming is not None:
            with torch.cuda.stream(copying):
                coming = move_micro_batch(coming, device)
        if current is not None:
            yield current
        if coming is None:
            return
        if not coming.is_on_host:
            using = torch.cuda.current_stream(device)
            using.wait_stream(copying)
            for tensor in iterate_tensors(coming.batch):
                # Or its memory could be reused while the model still reads it.
                tensor.record_stream(using)


def move_micro_batch(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch on the device; pinned memory is copied without waiting."""
    batch = move_to_device(micro_batch.batch, device)
    return micro_batch._replace(batch=batch, is_on_host=False)
