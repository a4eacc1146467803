"""Gradients of parameters that several stages hold, and the norm over all stages.

A tied embedding and head are on the first stage and on the last, each with a part of the gradient:
the parts are summed, so both copies get the same update and stay equal. The norm counts such a
parameter once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rapidformer.accel.data_parallel import shape_like
from rapidformer.accel.pipeline.cut import Holdings
from rapidformer.compat.torch_clipping import TotalNorm, extend_total_norm
from rapidformer.dist.whole import get_shard

Group = dist.ProcessGroup


class SharedGradients:
    """The parameters of this rank that other pipeline ranks hold too."""

    def __init__(self, model: nn.Module, holdings: Holdings, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group("pipeline")
        self._groups = _build_groups(set(holdings.processes_of.values()), mesh)
        self._names: dict[frozenset[int], list[str]] = defaultdict(list)
        self._counted_elsewhere: set[str] = set()
        for name, _ in model.named_parameters():
            holders = holdings.processes_of[name]
            if len(holders) > 1:
                self._names[holders].append(name)
                if dist.get_rank(self._group) != min(holders):
                    self._counted_elsewhere.add(name)

    def sum(self, model: nn.Module) -> None:
        """Sum the parts, in the same order on every rank that holds one."""
        if not self._names:
            return
        parameters = dict(model.named_parameters())
        for holders in sorted(self._names, key=sorted):
            trained = [parameters[n] for n in self._names[holders] if parameters[n].requires_grad]
            if trained:
                _sum_gradients(trained, self._groups[holders])

    def list_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that other ranks hold too."""
        parameters = dict(model.named_parameters())
        return [parameters[name] for names in self._names.values() for name in names]

    def serve_clipping(
        self, model: nn.Module, device: torch.device
    ) -> AbstractContextManager[None]:
        """Inside, torch's ``clip_grad_norm_`` uses the norm over all stages, on all ranks."""
        owner = weakref.ref(model)

        def measure(gradients: list[Tensor], order: float, compute: TotalNorm) -> Tensor | None:
            model = owner()
            if model is None:
                return None
            parameters = dict(model.named_parameters())
            known = {id(parameter.grad) for parameter in parameters.values()}
            if gradients and not any(id(gradient) in known for gradient in gradients):
                return None
            elsewhere = {id(parameters[name].grad) for name in self._counted_elsewhere}
            norm = compute([g for g in gradients if id(g) not in elsewhere], order)
            return self._join_norms(norm, order, device)

        return extend_total_norm(measure)

    def _join_norms(self, norm: Tensor, order: float, device: torch.device) -> Tensor:
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(device, torch.float64)
        if order == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
            return norm.float()
        power = norm.pow(order)
        dist.all_reduce(power, group=self._group)
        return power.pow(1 / order).float()

    def measure(
        self,
        model: nn.Module,
        measure_local: Callable[[Sequence[Tensor]], Tensor],
        device: torch.device,
    ) -> Tensor:
        """The norm of all gradients of all stages."""
        mine = [
            p.grad
            for name, p in model.named_parameters()
            if p.grad is not None and name not in self._counted_elsewhere
        ]
        return self._join_norms(measure_local(mine) if mine else torch.zeros(()), 2.0, device)


def _build_groups(sets: set[frozenset[int]], mesh: DeviceMesh) -> dict[frozenset[int], Group]:
    """A group for each set of holders; every rank of the run must create all of them."""
    axis = (mesh.mesh_dim_names or ()).index("pipeline")
    pipelines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh["pipeline"].size())
    groups: dict[frozenset[int], Group] = {}
    for holders in sorted((s for s in sets if len(s) > 1), key=sorted):
        if len(holders) == pipelines.shape[1]:
            groups[holders] = mesh.get_group("pipeline")
            continue
        for ranks in pipelines.tolist():
            members = [ranks[process] for process in sorted(holders)]
            made = dist.new_group(members)
            if dist.get_rank() in members:
                groups[holders] = made
    return groups


def _sum_gradients(parameters: list[nn.Parameter], group: Group) -> None:
    """Sum in place; a holder without a gradient contributes zeros."""
    users = torch.ones(len(parameters), device=get_shard(parameters[0]).device)
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            users[index] = 0
    dist.all_reduce(users, group=group)
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        local = torch.zeros_like(get_shard(parameter)) if gradient is None else get_shard(gradient)
        part = local.contiguous()
        dist.all_reduce(part, group=group)
        if gradient is not None:
            if part is not local:
                local.copy_(part)
        # Only a rank without the gradient must ask (and wait) whether another rank had it.
        elif float(users[index]) > 0:
            parameter.grad = shape_like(part.reshape(-1), parameter)
