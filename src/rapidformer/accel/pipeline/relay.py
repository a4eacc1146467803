"""A call of the model outside training: each stage runs its part, all ranks get the output.

So evaluation, prediction and generation are written as for a whole model. It is slow: one rank
works at a time. Every rank of the pipeline must make the same calls, as all do when they run the
same program on the same rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rapidformer.accel.pipeline.gates import StageContext, StageEnd
from rapidformer.accel.pipeline.layout import Layout

_DIMENSIONS = 8


def relay_call(
    run: Callable[[], Any],
    layout: Layout,
    context: StageContext,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Any:
    """``run()`` calls the model; returns the last stage's output, on every rank."""
    process = dist.get_rank(group)
    hidden: Tensor | None = None
    output: Any = None
    with torch.no_grad():
        for stage in layout.stages:
            if stage.owner == process:
                before = layout.stages[stage.index - 1].owner
                if not stage.is_first and before != process:
                    hidden = _receive(before, group, device, context.dtype)
                with context.at(stage, hidden):
                    try:
                        output = run()
                    except StageEnd as end:
                        hidden = end.hidden
                after = layout.stages[min(stage.index + 1, len(layout.stages) - 1)].owner
                if after != process:
                    assert hidden is not None
                    _send(hidden, after, group)
        return broadcast_nested(output, layout.stages[-1].owner, group, device)


def _send(hidden: Tensor, process: int, group: dist.ProcessGroup) -> None:
    shape = [*hidden.shape, *[0] * (_DIMENSIONS - hidden.dim())]
    header = torch.tensor([hidden.dim(), *shape], dtype=torch.long, device=hidden.device)
    dist.send(header, group=group, group_dst=process)
    dist.send(hidden.contiguous(), group=group, group_dst=process)


def _receive(
    process: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> Tensor:
    header = torch.empty(_DIMENSIONS + 1, dtype=torch.long, device=device)
    dist.recv(header, group=group, group_src=process)
    dims, *shape = header.tolist()
    hidden = torch.empty(shape[:dims], dtype=dtype, device=device)
    dist.recv(hidden, group=group, group_src=process)
    return hidden


class _Slot:
    """The position of a tensor in an output whose tensors are sent separately."""

    def __init__(self, number: int) -> None:
        self.number = number


def broadcast_nested(
    value: Any, source: int, group: dist.ProcessGroup, device: torch.device
) -> Any:
    """A nested value of one rank of the group, on all of them; tensors are sent as tensors."""
    is_source = dist.get_rank(group) == source
    tensors: list[Tensor] = []
    box: list[Any] = [None]
    if is_source:
        form = _map(value, lambda leaf: _take(leaf, tensors))
        box = [(form, [(t.shape, t.dtype) for t in tensors])]
    dist.broadcast_object_list(box, group=group, group_src=source)
    form, kinds = box[0]
    if not is_source:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)
    if is_source:
        return value
    return _map(form, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Slot) else leaf)


def _take(leaf: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    tensors.append(whole.detach().contiguous())
    return _Slot(len(tensors) - 1)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested value with other leaves; a model's output object keeps its class."""
    if isinstance(value, Mapping):
        changed = {key: _map(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        copied: Any = copy.copy(value)
        for key, item in changed.items():
            copied[key] = item
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return change(value)
