"""Copy batches to the device: the next one is copied while the current one is processed.

The copy runs from pinned memory on its own stream. A tensor made on that stream and used on another
must be marked with ``record_stream``, or its memory could be reused while the model still reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rapidformer.data.batch import move_to_device
from rapidformer.data.nested import iterate_tensors
from rapidformer.data.update import MicroBatch


def read_ahead(
    rounds: Iterator[MicroBatch],
    device: torch.device,
    stays_on_host: Callable[[], bool] | None = None,
) -> Iterator[MicroBatch]:
    """The same rounds with their batches on the device, one copied ahead of need.

    While ``stays_on_host()`` is true, batches stay in pinned host memory for the caller to move.
    """
    if device.type != "cuda":
        for each in rounds:
            stays = stays_on_host is not None and stays_on_host()
            yield each._replace(is_on_host=True) if stays else move_micro_batch(each, device)
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
            _make_usable(coming.batch, torch.cuda.current_stream(device), copying)


def move_micro_batch(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch on the device; pinned memory is copied without waiting."""
    batch = move_to_device(micro_batch.batch, device)
    return micro_batch._replace(batch=batch, is_on_host=False)


def _make_usable(batch: Any, using: torch.cuda.Stream, copying: torch.cuda.Stream) -> None:
    using.wait_stream(copying)
    for tensor in iterate_tensors(batch):
        tensor.record_stream(using)
