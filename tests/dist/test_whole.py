"""Split tensors are joined together or one by one, and are whole all the same."""

from __future__ import annotations

import torch
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
