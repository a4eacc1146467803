"""Batches on their way to the device: the next one is copied while this one is worked on.

The copy runs from pinned memory on a stream of its own. What a reader would get wrong: a tensor
made on that stream and used on another must be marked so (``record_stream``), or its memory would
be given away while the model still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rapidformer.data.batch import BatchInfo, iterate_tensors, move_to_device

_Round = tuple[Any, BatchInfo, bool]


def read_ahead(rounds: Iterator[_Round], device: torch.device) -> Iterator[_Round]:
    """The same rounds with their batches on the device, one copied ahead of need."""
    if device.type != "cuda":
        for batch, info, is_last in rounds:
            yield move_to_device(batch, device), info, is_last
        return
    copying = torch.cuda.Stream(device)
    coming: _Round | None = None
    while True:
        current, coming = coming, _start_copy(next(rounds, None), device, copying)
        if current is not None:
            yield current
        if coming is None:
            return
        _make_usable(coming[0], torch.cuda.current_stream(device), copying)


def _start_copy(
    round_: _Round | None, device: torch.device, copying: torch.cuda.Stream
) -> _Round | None:
    if round_ is None:
        return None
    batch, info, is_last = round_
    with torch.cuda.stream(copying):
        return move_to_device(batch, device), info, is_last


def _make_usable(batch: Any, using: torch.cuda.Stream, copying: torch.cuda.Stream) -> None:
    using.wait_stream(copying)
    for tensor in iterate_tensors(batch):
        tensor.record_stream(using)
