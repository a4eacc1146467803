"""BatchNorm on several ranks: statistics over the rows of all of them, as in one process.

Without this, each rank would normalise by its own rows and keep its own running statistics, and a
checkpoint would save those of rank 0. torch's SyncBatchNorm does the same on GPUs only. Gradient
accumulation cannot be exact: no micro-batch knows the rows of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_modules import list_hooks
from rapidformer.dist.regions import copy_in, sum_out
from rapidformer.log import warn_once
from rapidformer.overlay import extend

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def apply(assembly: Assembly) -> str | None:
    """Let every BatchNorm see the rows of all replicas."""
    model, micro_batches = assembly.model, assembly.args.gradient_accumulation_steps or 1
    # torch's old spectral_norm is a hook, the new one a module.
    parts = [part for module in model.modules() for part in (module, *list_hooks(module))]
    has_spectral_norm = any(type(p).__name__ in ("SpectralNorm", "_SpectralNorm") for p in parts)
    if micro_batches > 1 and has_spectral_norm:
        warn_once(
            f"spectral_norm improves its estimate in every forward pass: {micro_batches} times in "
            "an optimizer step, not once, so the result depends on --micro-batch-size. Raise it "
            "until a step is one micro-batch."
        )
    modules = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    if not modules:
        return None
    if micro_batches > 1:
        warn_once(
            f"BatchNorm takes its statistics over one micro-batch, not over the {micro_batches} of "
            "an optimizer step: the result depends on --micro-batch-size. Raise it until a step "
            "is one micro-batch, or use LayerNorm or GroupNorm."
        )
    group = assembly.topology.get_replica_group()
    if group is None:
        return None
    members = {"_replicas": group, "_is_filler": staticmethod(assembly.is_filler)}
    for module in modules:
        extend(module, "statistics", lambda cls: members, styles=(_JoinedStatistics,))
    return f"statistics of {len(modules)} layers over {group.size()} ranks"


class _JoinedStatistics:
    """Placed in front of a BatchNorm's own class."""

    _replicas: dist.ProcessGroup
    _is_filler: Callable[[], bool]

    def forward(self: Any, rows: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(rows)  # type: ignore[misc]
        values = rows.float()
        dims = [0, *range(2, rows.dim())]
        shape = [1, -1] + [1] * (rows.dim() - 2)
        # The number of rows may differ between ranks; it is sent with their sum.
        # A filler keeps its rank in step, but is none of the batch's rows.
        counted = 0.0 if self._is_filler() else 1.0
        count = values.new_full((1,), counted * values.numel() / values.shape[1])
        summed = self._sum(torch.cat([values.sum(dims) * counted, count]))
        *sums, total = summed.split([values.shape[1], 1])
        mean = sums[0] / total
        centred = values - mean.view(shape)
        # From centred values: the mean of squares minus the squared mean would cancel.
        variance = self._sum(centred.square().sum(dims) * counted) / total
        if self.training and self.running_mean is not None:
            self._follow(mean, variance * total / (total - 1))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(rows.dtype)

    def _sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, whose gradient is summed too."""
        return copy_in(sum_out(tensor, self._replicas), self._replicas)

    @torch.no_grad()
    def _follow(self: Any, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
        self.running_mean.mul_(1 - momentum).add_(mean * momentum)
        self.running_var.mul_(1 - momentum).add_(variance * momentum)
