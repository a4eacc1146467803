"""Communication between the ranks that share a layer, each operation with its gradient.

In some parts of a layer every rank holds the whole activation, in others each holds a slice. Going
from one to the other is a collective, and its gradient is the mirror image:

    copy_in       whole -> whole, before a split product    gradients are summed
    sum_out       parts of a sum -> the sum                 gradients pass as they are
    gather_out    slices -> whole                           gradients are sliced
    slice_in      whole -> slices                           gradients are gathered
    gather_in     slices -> whole, before a split product   gradients are summed and sliced
    scatter_out   parts of a sum -> slices of the sum       gradients are gathered

Under ``create_graph=True`` a gradient is computed by the mirror image itself, so that gradients of
gradients (a gradient penalty) are right as well.

A slice may be shorter than the others (a vocabulary of 131 on two ranks). Slices are those of
``torch.chunk``, like DTensor's, and are padded for the exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from rapidformer.compat.torch_distributed import operations
from rapidformer.dist.whole import join_parts

Group = dist.ProcessGroup


def get_slice_bounds(length: int, group: Group) -> tuple[int, int]:
    """Where this rank's slice of a dimension starts and ends."""
    size = -(-length // dist.get_world_size(group))
    start = min(dist.get_rank(group) * size, length)
    return start, min(start + size, length)


def copy_in(tensor: Tensor, group: Group) -> Tensor:
    """Identity; in the backward pass, gradients are summed over the ranks."""
    return _CopyIn.apply(tensor, group)


def sum_out(tensor: Tensor, group: Group) -> Tensor:
    """The sum over the ranks."""
    return _SumOut.apply(tensor, group)


def gather_out(tensor: Tensor, dim: int, length: int, group: Group) -> Tensor:
    """All slices joined along a dimension that is ``length`` long."""
    return _Gather.apply(tensor, dim, length, group, False)


def slice_in(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's slice of what all of them hold."""
    return _Slice.apply(tensor, dim, group, False)


def gather_in(tensor: Tensor, dim: int, length: int, group: Group) -> Tensor:
    """All slices joined, as input of a product of which each rank computes its part."""
    return _Gather.apply(tensor, dim, length, group, True)


def scatter_out(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's slice of the sum over the ranks."""
    return _Slice.apply(tensor, dim, group, True)


def get_local(tensor: DTensor) -> Tensor:
    """This rank's slice; unlike ``to_local`` in torch 2.11, its gradient can be differentiated."""
    return _Local.apply(tensor)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sum_all = sum_out if torch.is_grad_enabled() else sum_over
        return sum_all(gradient, ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sum_over(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy_in(gradient, ctx.group) if torch.is_grad_enabled() else gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, length: int, group: Group, is_input: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.is_input = dim, group, is_input
        return gather_slices(tensor, dim, length, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.is_input:
            cut = scatter_out if torch.is_grad_enabled() else _sum_and_slice
        else:
            cut = slice_in if torch.is_grad_enabled() else take_slice
        return cut(gradient, ctx.dim, ctx.group), None, None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group, is_sum: bool) -> Tensor:
        ctx.dim, ctx.length, ctx.group, ctx.is_sum = dim, tensor.shape[dim], group, is_sum
        cut = _sum_and_slice if is_sum else take_slice
        return cut(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mirror = gather_in if ctx.is_sum else gather_out
        gather = mirror if torch.is_grad_enabled() else gather_slices
        return gather(gradient, ctx.dim, ctx.length, ctx.group), None, None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = tensor.device_mesh, tensor.placements, tensor.shape
        local: Tensor = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return join_parts(gradient.contiguous(), ctx.mesh, ctx.placements, ctx.shape)


def sum_over(tensor: Tensor, group: Group) -> Tensor:
    return wait(operations.all_reduce(tensor.contiguous(), "sum", group.group_name))


def wait(tensor: Tensor) -> Tensor:
    return operations.wait_tensor(tensor)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Send this many of the rows to each rank, and receive as many from it as it sends."""
    return wait(operations.all_to_all_single(rows.contiguous(), received, sent, group.group_name))


def take_slice(tensor: Tensor, dim: int, group: Group) -> Tensor:
    start, end = get_slice_bounds(tensor.shape[dim], group)
    # A copy: a view would keep the whole tensor alive.
    return tensor.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)


def gather_slices(tensor: Tensor, dim: int, length: int, group: Group) -> Tensor:
    world_size = dist.get_world_size(group)
    size = -(-length // world_size)
    # Along dimension 0, which needs no rearranging for the exchange; reorder afterwards.
    rows = pad_to(tensor, dim, size).movedim(dim, 0).contiguous()
    joined = wait(operations.all_gather_into_tensor(rows, world_size, group.group_name))
    return joined[:length].movedim(0, dim).contiguous()


def _sum_and_slice(tensor: Tensor, dim: int, group: Group) -> Tensor:
    length, world_size = tensor.shape[dim], dist.get_world_size(group)
    size = -(-length // world_size)
    rows = pad_to(tensor, dim, size * world_size).movedim(dim, 0).contiguous()
    summed = wait(operations.reduce_scatter_tensor(rows, "sum", world_size, group.group_name))
    start, end = get_slice_bounds(length, group)
    return summed[: end - start].movedim(0, dim).contiguous()


def pad_to(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    after = [0, 0] * (tensor.dim() - 1 - dim % tensor.dim())
    return pad(tensor, [*after, 0, missing])
