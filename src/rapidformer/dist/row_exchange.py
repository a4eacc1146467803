"""Rows to the processes that own their experts, and back, each way with its gradient.

How many rows go where is known only once tokens have been routed: counts are exchanged first, and
have to be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rapidformer.dist.regions import Group, operations, wait


@dataclass(frozen=True)
class Route:
    """How many rows this process sends to each of the group, and gets from each."""

    group: Group
    sent: list[int]
    received: list[int]
    order: Tensor
    """Brings received rows, which come by process, into the order of this process's experts."""
    counts: Tensor
    """Received rows of each of this process's experts."""

    def send(self, rows: Tensor) -> Tensor:
        """Rows sorted by expert, to their owners: what comes in is sorted by own expert."""
        arrived: Tensor = _Exchange.apply(rows, self.sent, self.received, self.group)  # type: ignore[no-untyped-call]
        return arrived.index_select(0, self.order)

    def send_back(self, rows: Tensor) -> Tensor:
        """What was made of them, to where they came from and in the order they had there."""
        by_process = rows.index_select(0, self.order.argsort())
        returned: Tensor = _Exchange.apply(by_process, self.received, self.sent, self.group)  # type: ignore[no-untyped-call]
        return returned


def plan_route(counts: Tensor, group: Group) -> Route:
    """From the rows that this process has for each expert of all; waits for the device."""
    size = dist.get_world_size(group)
    mine = counts.view(size, -1)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine.contiguous(), group=group)
    experts = torch.arange(theirs.shape[1], device=counts.device).repeat(size)
    by_arrival = experts.repeat_interleave(theirs.flatten())
    sent, received = torch.stack([mine.sum(dim=1), theirs.sum(dim=1)]).tolist()
    order = by_arrival.argsort(stable=True)
    return Route(group, sent, received, order, theirs.sum(dim=0))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Group
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    return wait(operations.all_to_all_single(rows.contiguous(), received, sent, group.group_name))
