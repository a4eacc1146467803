"""Send rows to the ranks that own their experts, and back, each way with its gradient.

How many rows go where is known only after routing, so counts are exchanged first, and the host has
to wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rapidformer.compat.torch_distributed import operations
from rapidformer.dist.regions import Group, wait


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to, and receives from, each rank of the group."""

    group: Group
    sent: list[int]
    received: list[int]
    order: Tensor
    """Sorts received rows, which arrive by rank, by this rank's experts."""
    counts: Tensor
    """Rows received for each of this rank's experts."""

    def send(self, rows: Tensor) -> Tensor:
        """Send rows sorted by expert to their owners; what arrives is sorted by local expert."""
        arrived: Tensor = _Exchange.apply(rows, self.sent, self.received, self.group)
        return arrived.index_select(0, self.order)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send the results back to where the rows came from, in their original order."""
        by_process = rows.index_select(0, self.order.argsort())
        returned: Tensor = _Exchange.apply(by_process, self.received, self.sent, self.group)
        return returned


def plan_route(counts: Tensor, group: Group) -> Route:
    """Built from the number of rows this rank has for each expert; waits for the device."""
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
