"""Blocks that are timed on the device at hand, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rapidformer.planning import at_hand
from rapidformer.planning.answer import answer, describe
from rapidformer.planning.at_hand import BlockTimer, time_on_gpu
from rapidformer.planning.parts import Load, Shape, Timed
from rapidformer.planning.timing import compare_blocks
from tests.planning.states import make_training, measure_training
from tests.planning.test_search import BLOCK, LENGTH, ROWS, SHAPE, build

CPU = torch.device("cpu")


def build_timer(calls: list[Any], problem: Exception | None = None) -> BlockTimer:
    """A clock that shows a quarter of a second for every step."""

    def run(step: Callable[[], object]) -> float:
        calls.append(step)
        if problem is not None:
            raise problem
        step()
        return 0.25

    return BlockTimer(CPU, torch.bfloat16, run)


# Positions that blocks are called with, two stacks, and two kinds of blocks in one.
@pytest.mark.parametrize("model", ["llama", "t5", "gpt-moe"])
def test_a_block_of_each_kind_runs_with_values(model: str) -> None:
    calls: list[Any] = []
    timer = build_timer(calls)
    shape = measure_training(make_training(model), timer)
    assert timer.problem is None
    assert len(calls) == len(shape.blocks)
    for group in shape.blocks:
        assert group.timed is not None and group.timed.seconds == 0.25
        known = group.part.matrix_flops.at(shape.rows, shape.length)
        assert group.timed.load.matrix_flops == pytest.approx(known)


def test_what_cannot_run_is_tried_once_and_explained() -> None:
    calls: list[Any] = []
    timer = build_timer(calls, torch.OutOfMemoryError("CUDA out of memory.\nTried to ..."))
    shape = measure_training(make_training("gpt-moe"), timer)
    assert len(shape.blocks) > 1 and len(calls) == 1
    assert timer.problem == "OutOfMemoryError: CUDA out of memory."
    assert all(group.timed is None for group in shape.blocks)
    text = "\n".join(describe(answer(build(64), timer.problem)))
    assert "not measured, since blocks did not run here: OutOfMemoryError: CUDA out of" in text


def time_blocks(seconds: float) -> Shape:
    tokens = ROWS * LENGTH
    load = Load(
        matrix_flops=BLOCK.matrix_flops.per_token * tokens, moved=BLOCK.moved.per_token * tokens,
        operations=BLOCK.operations,
    )  # fmt: skip
    groups = (replace(each, timed=Timed(seconds=seconds, load=load)) for each in SHAPE.blocks)
    return replace(SHAPE, blocks=tuple(groups))


def test_kernels_of_blocks_take_as_long_as_measured() -> None:
    plain = build(64, cuda_graph="off")
    computed = plain.plan().timing.parts
    kernels = sum(computed[name] for name in ("products", "other kernels"))
    shape = time_blocks(seconds=kernels)  # of four blocks together, for each of them
    assert compare_blocks(shape, plain.cluster.device) == pytest.approx(4.0)
    timed = build(64, shape=shape, cuda_graph="off")
    found = timed.plan().timing.parts
    assert found["products"] == pytest.approx(4 * computed["products"])
    assert found["optimizer"] == computed["optimizer"]
    text = "\n".join(describe(answer(timed)))
    assert "measured on this GPU: blocks take 4.00 times what was predicted" in text
    assert "measured" not in "\n".join(describe(answer(plain)))


def test_the_gpu_waits_until_a_step_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("warm"))
    monkeypatch.setattr(at_hand, "keep_gpu_waiting", lambda seconds: events.append("busy"))
    assert time_on_gpu(lambda: events.append("step")) == pytest.approx(0.002)
    assert events[:2] == ["step", "warm"]
    assert events[-5:] == ["busy", "record", "step", "record", "wait"]
