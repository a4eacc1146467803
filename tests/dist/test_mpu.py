"""Megatron's names over our processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rapidformer.dist import mpu
from rapidformer.dist.processes import start_processes
from rapidformer.dist.topology import build_topology
from rapidformer.errors import RapidformerError
from tests.processes import run_in_kept_processes


def build_batch() -> dict[str, torch.Tensor]:
    return {"text": torch.arange(12).view(3, 4), "rows": torch.arange(3), "other": torch.ones(2)}


def test_alone_it_picks_the_keys() -> None:
    batch = build_batch()
    picked = mpu.broadcast_data(["text", "rows"], batch, torch.int64)
    assert list(picked) == ["text", "rows"]
    assert torch.equal(picked["text"], batch["text"])


@pytest.mark.parametrize(
    ("keys", "data", "message"),
    [
        (["text"], None, "the first process of the group has no data"),
        (["text", "txet"], build_batch(), "no tensor 'txet': it has text, rows, other"),
        (["other"], build_batch(), "'other' is torch.float32, not torch.int64"),
        (["x"], {"x": torch.zeros(1, 1, 1, 1, 1).long()}, "has 5 dimensions, more than 4"),
    ],
)
def test_bad_batches_are_explained(keys: list[str], data: Any, message: str) -> None:
    with pytest.raises(RapidformerError, match=message):
        mpu.broadcast_data(keys, data, torch.int64)


def _broadcast() -> tuple[dict[str, list[Any]], str, tuple[int, int]]:
    start_processes(device="cpu")
    build_topology("cpu", tensor=2)
    is_source = mpu.get_tensor_model_parallel_rank() == 0
    keys = ["rows", "text"]
    data = build_batch() if is_source else None
    got = mpu.broadcast_data(keys, data, torch.int64)
    bad = {"rows": torch.zeros(1)} if is_source else None
    with pytest.raises(RapidformerError) as error:
        mpu.broadcast_data(["rows"], bad, torch.int64)
    ranks = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
    return {key: value.tolist() for key, value in got.items()}, str(error.value), ranks


def test_a_group_gets_what_its_first_process_has() -> None:
    """The others pass None; what is wrong with the batch is said on all of them."""
    batch = build_batch()
    expected = {"rows": batch["rows"].tolist(), "text": batch["text"].tolist()}
    for rank, (got, error, ranks) in enumerate(run_in_kept_processes(_broadcast, 2)):
        assert got == expected
        assert "'rows' is torch.float32, not torch.int64" in error
        assert ranks == (rank, 2)


def _look_at_groups() -> dict[str, Any]:
    processes = start_processes(device="cpu")
    build_topology("cpu", pipeline=2, data=2)
    own = torch.full((1,), float(processes.rank))
    dist.all_reduce(own, group=mpu.get_tensor_model_parallel_group())
    # Nobody shares experts: a group of one as well.
    dist.all_reduce(own, group=mpu.get_expert_model_parallel_group())
    together = torch.full((1,), float(processes.rank))
    dist.all_reduce(together, group=mpu.get_data_parallel_group())
    return {
        "alone": own.item(),
        "data": together.item(),
        "sources": (mpu.get_tensor_model_parallel_src_rank(), mpu.get_data_parallel_src_rank()),
        "ends": (
            mpu.get_pipeline_model_parallel_first_rank(),
            mpu.get_pipeline_model_parallel_last_rank(),
        ),
        "neighbours": (
            mpu.get_pipeline_model_parallel_prev_rank(),
            mpu.get_pipeline_model_parallel_next_rank(),
        ),
    }


def test_an_axis_of_one_process_has_a_group_of_one() -> None:
    """None would be all processes to torch: their values would be summed without a word."""
    for rank, found in enumerate(run_in_kept_processes(_look_at_groups, 4)):
        stage, replica = divmod(rank, 2)
        assert found["alone"] == rank
        assert found["data"] == 4 * stage + 1
        assert found["sources"] == (rank, 2 * stage)
        assert found["ends"] == (replica, 2 + replica)
        assert found["neighbours"] == ((rank + 2) % 4, (rank + 2) % 4)


def test_groups_of_one_process() -> None:
    assert mpu.get_data_parallel_rank() == mpu.get_tensor_model_parallel_rank() == 0
    assert mpu.get_data_parallel_world_size() == mpu.get_model_parallel_world_size() == 1
    assert mpu.get_data_parallel_group() is None
    assert mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage()
    assert mpu.model_parallel_is_initialized()
