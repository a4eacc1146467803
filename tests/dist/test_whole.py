"""Split tensors are joined together or one by one, and are whole all the same."""

from __future__ import annotations

import torch
from torch.distributed import get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rapidformer.compat.torch_distributed import broadcast_from_first
from rapidformer.dist import whole
from tests.processes import run_in_processes


def _join_all() -> list[bool]:
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole._MOST_AT_ONCE = 30  # two of the small ones at a time
    kinds = [((4, 3), Shard(0)), ((3, 4), Shard(1)), ((5, 2), Shard(0)), ((4, 3), Replicate())]
    kinds += [((2, 6), Shard(0)), ((8, 8), Shard(0)), ((6,), Shard(0))]
    tensors = [torch.randn(shape) for shape, _ in kinds]
    split = [
        distribute_tensor(tensor, mesh, [placement])
        for tensor, (_, placement) in zip(tensors, kinds, strict=True)
    ]
    joined = dict(whole.join_each([*split, torch.ones(2)]))
    assert sorted(joined) == list(range(len(kinds) + 1))
    return [torch.equal(joined[index], tensor) for index, tensor in enumerate(tensors)]


def test_equal_uneven_large_and_whole_ones() -> None:
    for are_equal in run_in_processes(_join_all, 2):
        assert all(are_equal)


def _broadcast() -> list[float]:
    init_process_group("gloo")
    rank = float(get_rank())
    tensors = [torch.full((2, 3), rank).t(), torch.full((2,), rank).bfloat16(), torch.tensor(rank)]
    tensors += [torch.empty(0), torch.full((2,), int(rank)), torch.tensor(rank > 0)]
    broadcast_from_first(tensors)
    broadcast_from_first([])  # of a model without weights
    return [float(tensor.sum()) for tensor in tensors]


def test_all_ranks_get_the_weights_of_the_first() -> None:
    assert run_in_processes(_broadcast, 2) == [[0.0] * 6] * 2
