"""Copy batches to the device: the next one is copied while the current one is processed.

The copy runs from pinned memory on its own stream. A tensor made on that stream and used on another
must be marked with ``record_stream``, or its memory could be reused while the model still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rapidformer.data.batch import iterate_tensors, move_to_device
from rapidformer.data.update import MicroBatch


def read_ahead(rounds: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """The same rounds with their batches on the device, one copied ahead of need."""
    if device.type != "cuda":
        for each in rounds:
            yield _move(each, device)
        return
    copying = torch.cuda.Stream(device)
    coming: MicroBatch | None = None
    while True:
        current, coming = coming, _start_copy(next(rounds, None), device, copying)
        if current is not None:
            yield current
        if coming is None:
            return
        _make_usable(coming.batch, torch.cuda.current_stream(device), copying)


def _start_copy(
    micro_batch: MicroBatch | None, device: torch.device, copying: torch.cuda.Stream
) -> MicroBatch | None:
    if micro_batch is None:
        return None
    with torch.cuda.stream(copying):
        return _move(micro_batch, device)


def _move(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    return micro_batch._replace(batch=move_to_device(micro_batch.batch, device))


def _make_usable(batch: Any, using: torch.cuda.Stream, copying: torch.cuda.Stream) -> None:
    using.wait_stream(copying)
    for tensor in iterate_tensors(batch):
        tensor.record_stream(using)
