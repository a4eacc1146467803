"""Data parallelism without a wrapper: gradients are summed over all ranks, the module stays.

DistributedDataParallel would decide in the *forward* pass whether to communicate, and fail on
parameters that a step does not use. Here a hook per parameter fills buckets during the backward
pass; a parameter that no rank used keeps ``grad = None``, as in one process.

A replayed CUDA graph runs no hooks: its gradients are sent afterwards, in the same buckets. So a
rank that replays its passes and one that runs them exchange the same things in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.assembly import Assembly, GradientSynchronizer
from rapidformer.compat.torch_tensors import copy_all
from rapidformer.dist.whole import get_shard

_BUCKET_BYTES = 25 * 2**20

Gradients = Mapping[nn.Parameter, torch.Tensor]


def apply(assembly: Assembly) -> str | None:
    """Sum gradients over the ranks with different tokens."""
    mesh = assembly.topology.get_sharding_mesh()
    if mesh is None:  # a second model may have other settings than the ranks' layout
        return None
    same_experts = assembly.topology.get_expert_mesh("expert_data")
    reducer: GradientReducer | ExpertGradients
    if same_experts is None:
        reducer = GradientReducer(assembly.model.parameters(), mesh.get_group())
    else:
        reducer = ExpertGradients(assembly.model, assembly.experts, mesh, same_experts)
    assembly.synchronizer = reducer
    assembly.applied.on_close(reducer.close)
    return f"gradients summed over {mesh.size()} ranks"


@dataclass(frozen=True)
class _Memory:
    """A bucket at a fixed place, which a CUDA graph fills."""

    flat: torch.Tensor
    places: list[torch.Tensor]
    """Views of it: the gradient of each parameter."""
    flags: torch.Tensor
    """Another view: which of them are gradients."""


@dataclass(eq=False)
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    waiting: int = 0
    flat: torch.Tensor | None = None
    work: dist.Work | None = None
    flags: dict[tuple[bool, ...], torch.Tensor] = field(default_factory=dict)
    """On the device, by which parameters have a gradient: what CUDA graphs send to say so."""
    memory: _Memory | None = None

    def get_flags(self, used: tuple[bool, ...], *, is_kept: bool) -> torch.Tensor:
        flags, first = self.flags.get(used), self.parameters[0]
        if flags is None:
            flags = torch.tensor(used, dtype=first.dtype, device=first.device)
            if is_kept or all(used):
                self.flags[used] = flags
        return flags

    def split(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each parameter's gradient, as a flat tensor, and the flags."""
        sizes = [get_shard(p).numel() for p in self.parameters]
        *gradients, flags = flat.split([*sizes, len(sizes)])
        return gradients, flags

    def get_memory(self) -> _Memory:
        if self.memory is None:
            first, parameters = self.parameters[0], self.parameters
            size = sum(p.numel() for p in parameters) + len(parameters)
            flat = torch.zeros(size, dtype=first.dtype, device=first.device)
            pieces, flags = self.split(flat)
            places = [shape_like(each, p) for each, p in zip(pieces, parameters, strict=True)]
            self.memory = _Memory(flat, places, flags)
        return self.memory


class GradientReducer(GradientSynchronizer):
    """Sums gradients over the ranks while the backward pass is still running."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group, self._frozen = group, list(parameters)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._is_active, self._next = False, 0
        self._hooks: list[RemovableHandle] = []
        self._adopt_unfrozen()

    def _adopt_unfrozen(self) -> None:
        """Also sum the gradients of parameters unfrozen since the last update."""
        unfrozen = [p for p in self._frozen if p.requires_grad]
        if not unfrozen:
            return
        self._frozen = [p for p in self._frozen if not p.requires_grad]
        for bucket in _build_buckets(unfrozen):
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(bucket.parameters, bucket)
        self._hooks += [p.register_post_accumulate_grad_hook(self.on_gradient) for p in unfrozen]

    def close(self) -> None:
        """Sum nothing any more."""
        while self._hooks:
            self._hooks.pop().remove()

    def before_backward(self, is_last: bool) -> None:
        """Sum in the coming backward pass, if it is the last of the update."""
        if is_last:
            self._adopt_unfrozen()
        self._is_active, self._next = is_last, 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def after_backward(self) -> None:
        """Send the remaining buckets, wait for the sums and assign them as gradients."""
        if not self._is_active:
            return
        self._is_active = False
        for bucket in self._buckets[self._next :]:
            _launch(bucket, self._group)
        for bucket in self._buckets:
            _finish(bucket)

    def place(self, gradients: Gradients) -> dict[nn.Parameter, torch.Tensor]:
        """Copy gradients to where ``sum_placed`` takes them from; returns them there.

        A CUDA graph may record this, once it has run.
        """
        self._adopt_unfrozen()
        placed: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self._buckets:
            memory, used = bucket.get_memory(), tuple(p in gradients for p in bucket.parameters)
            pairs = list(zip(bucket.parameters, memory.places, strict=True))
            here = {p: place for p, place in pairs if p in gradients}
            for place in (place for p, place in pairs if p not in gradients):
                place.zero_()
            sources = [*(gradients[p] for p in here), bucket.get_flags(used, is_kept=True)]
            copy_all([*here.values(), memory.flags], sources)
            placed |= here
        return placed

    def close_places(self) -> None:
        """Give back the memory of ``place``, which no CUDA graph fills any more."""
        for bucket in self._buckets:
            bucket.memory = None

    def sum_placed(self, placed: Gradients) -> dict[nn.Parameter, torch.Tensor]:
        """Sum over the ranks what was placed, in place; returns the gradients of the update."""
        for bucket in self._buckets:
            flat = bucket.get_memory().flat
            bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work, memory = None, bucket.get_memory()
            users = count_users(memory.flags, [p in placed for p in bucket.parameters])
            rows = zip(bucket.parameters, memory.places, users, strict=True)
            sums |= {p: place for p, place, count in rows if count > 0}
        return sums

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Called when a parameter's gradient is ready: send its bucket once it is full."""
        if not self._is_active:
            return
        bucket = self._bucket_of[parameter]
        if bucket.work is not None:
            raise RuntimeError(
                "a parameter got a second gradient in one backward pass after the first was sent. "
                "This happens with reentrant activation checkpointing: use use_reentrant=False."
            )
        bucket.waiting -= 1
        # In order, not as they fill: every rank must send the same bucket at the same time.
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            _launch(self._buckets[self._next], self._group)
            self._next += 1


class ExpertGradients(GradientSynchronizer):
    """Sums gradients: of experts over one group, of everything else over all replicas."""

    def __init__(
        self, model: nn.Module, experts: Sequence[nn.Module], replicas: DeviceMesh, same: DeviceMesh
    ) -> None:
        split = [p for module in experts for p in module.parameters()]
        known = {id(p) for p in split}
        others = [p for p in model.parameters() if id(p) not in known]
        self._reducers = [GradientReducer(others, replicas.get_group())]
        if same.size() > 1:
            self._reducers.append(GradientReducer(split, same.get_group()))

    def before_backward(self, is_last: bool) -> None:
        for reducer in self._reducers:
            reducer.before_backward(is_last)

    def after_backward(self) -> None:
        for reducer in self._reducers:
            reducer.after_backward()

    def close(self) -> None:
        for reducer in self._reducers:
            reducer.close()


def _build_buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Group parameters from last to first: the order in which gradients arrive."""
    buckets: list[_Bucket] = []
    size = 0
    # A parameter that is used twice is listed once: `parameters()` drops duplicates.
    for parameter in reversed(list(parameters)):
        last = buckets[-1].parameters[0] if buckets else None
        if last is None or size >= _BUCKET_BYTES or last.dtype != parameter.dtype:
            buckets.append(_Bucket())
            size = 0
        buckets[-1].parameters.append(parameter)
        size += get_shard(parameter).numel() * parameter.element_size()
    return buckets


def shape_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's slice, however shaped, as a tensor that is split like the parameter."""
    if not isinstance(parameter, DTensor):
        return flat.view_as(parameter)
    mesh, placements = parameter.device_mesh, parameter.placements
    local, shape, stride = flat.view_as(get_shard(parameter)), parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _launch(bucket: _Bucket, group: dist.ProcessGroup) -> None:
    flags = bucket.get_flags(tuple(p.grad is not None for p in bucket.parameters), is_kept=False)
    pieces = [
        torch.zeros_like(get_shard(p)) if p.grad is None else get_shard(p.grad)
        for p in bucket.parameters
    ]
    bucket.flat = torch.cat([*(piece.reshape(-1) for piece in pieces), flags])
    bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)


def _finish(bucket: _Bucket) -> None:
    assert bucket.work is not None and bucket.flat is not None
    bucket.work.wait()
    gradients, flags = bucket.split(bucket.flat)
    users = count_users(flags, [p.grad is not None for p in bucket.parameters])
    for parameter, gradient, count in zip(bucket.parameters, gradients, users, strict=True):
        if count > 0:
            parameter.grad = shape_like(gradient, parameter)
    bucket.flat, bucket.work = None, None


def count_users(flags: torch.Tensor, used: Sequence[bool]) -> list[float]:
    """On how many ranks each parameter has a gradient, by the sum of their flags; at least 1 if it
    has one on this rank.
    """
    # Only a rank without a gradient must ask (and wait) whether another rank had one.
    return [1.0] * len(used) if all(used) else flags.tolist()
