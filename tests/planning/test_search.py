"""The layouts that fit, on a hand-made model of four equal blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rapidformer.config import Settings, resolve
from rapidformer.planning.answer import answer, describe
from rapidformer.planning.devices import GIB, Cluster, Device
from rapidformer.planning.parts import Blocks, Cost, Parameter, Part, Prediction, Shape, Weights
from rapidformer.planning.search import Planner, render_flags

ROWS, LENGTH = 4, 1024
MATRIX = Parameter(
    length=4096, size=4096 * 4096, width=4, is_trained=True, split_dim=0, is_matrix=True
)
BLOCK = Part(
    weights=Weights(parameters=(MATRIX,)),
    saved=Cost(per_token=2**20), saved_split=Cost(per_token=2**19),
    saved_selective=Cost(per_token=2**18), saved_compiled=Cost(per_token=2**19),
    inputs=Cost(per_token=2**13),
    matrix_flops=Cost(per_token=6.0 * 4096 * 4096), moved=Cost(per_token=2**21), operations=100,
)  # fmt: skip
SHAPE = Shape(
    model="Square", rows=ROWS, micro_batch_size=ROWS, length=LENGTH, filled=1.0,
    trained_tokens=1.0, precision="bf16",
    hidden_size=4096, vocabulary=0, head=0, rest=Part(), loss=Part(), samples=64,
    blocks=(Blocks(stack="h", places=(0, 1, 2, 3), part=BLOCK),),
)  # fmt: skip


def build(memory: float, count: int = 1, shape: Shape = SHAPE, **given: Any) -> Planner:
    settings = Settings(
        **{"micro_batch_size": ROWS, "mixed_precision": "bf16", "epochs": 1, "lr": 1e-3, **given}
    )
    device = Device("round", memory, 100, 200, 10, 1000, 100, 10)
    return Planner(shape, resolve(settings, world_size=count), Cluster(device, count))


def get_gib(planner: Planner) -> float:
    return planner.plan().gib


def test_limits_are_at_the_edge_of_what_fits() -> None:
    planner = build(24)
    rows = planner.find_largest_batch()
    for wanted, fits in ((rows, True), (rows + 1, False)):
        other = build(24, micro_batch_size=wanted)
        assert (other.plan().judge(other.cluster) == "fits") is fits
    assert rows > ROWS
    assert planner.find_longest() == pytest.approx(LENGTH * rows / ROWS, rel=0.3)
    assert build(1).find_largest_batch() == 0


def test_the_longest_rows_have_positions() -> None:
    fitting = build(24).find_longest()
    for positions, longest in ((1100, 1100), (2 * fitting, fitting), (1, LENGTH)):
        planner = build(24, shape=replace(SHAPE, positions=positions))
        assert planner.find_longest() == pytest.approx(longest, rel=2e-3)
    text = "\n".join(describe(answer(build(24, shape=replace(SHAPE, positions=LENGTH)))))
    assert "rows of up to 1,024 tokens, all that the model has positions for" in text


def test_a_run_that_fits_only_if_the_allocator_loses_little_is_tight() -> None:
    memory = build(24).plan().prediction.memory
    assert memory.allocated < memory.least < memory.total
    edges = {"fits": memory.total / 0.94, "tight": memory.total, "does not fit": memory.least - 1}
    for verdict, size in edges.items():
        assert memory.judge(size) == verdict
    text = "\n".join(describe(answer(build(memory.total / GIB))))
    assert "tight on round" in text and "to fit" in text


def test_a_step_is_not_recorded_without_room_for_a_second_one() -> None:
    def is_captured(memory: float) -> bool:
        return build(memory, micro_batch_size=1).plan().prediction.work.is_captured

    needed = get_gib(build(64, micro_batch_size=1))
    assert is_captured(64) and not is_captured(1.2 * needed)
    assert (
        build(1.2 * needed, micro_batch_size=1, cuda_graph="on").plan().prediction.work.is_captured
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_replayed_steps_keep_what_zero_1_keeps(stage: int) -> None:
    """Unless the model is large: then they are not replayed."""

    def plan(stage: int, shape: Shape = SHAPE, **more: Any) -> Prediction:
        zero = {f"zero_{stage}_memory_optimization": True}
        return build(640, 4, shape, **zero, **more).plan().prediction

    replayed, first = plan(stage), plan(1)
    assert replayed.work.is_captured
    assert replayed.memory == first.memory
    assert replayed.work.collectives == first.work.collectives
    blocks = replace(SHAPE.blocks[0], places=tuple(range(33)))  # 33 / 16 GiB of weights
    shape = replace(SHAPE, blocks=(blocks,))
    large, off = plan(stage, shape), plan(stage, shape, cuda_graph="off")
    assert plan(1, shape).work.is_captured and not large.work.is_captured
    assert large.memory == off.memory


def test_switches_that_make_it_fit_are_ranked_by_time() -> None:
    planner = build(12)
    assert get_gib(planner) > 12
    switches = planner.list_switches(9)
    assert {layout.list_flags() for layout in switches} >= {
        "--compile", "--recompute-granularity full", "--micro-batch-size 2 --global-batch-size 4",
    }  # fmt: skip
    assert all(layout.gib <= 12 for layout in switches)
    times = [layout.timing.step for layout in switches]
    assert times == sorted(times)


def test_layouts_keep_the_global_batch() -> None:
    planner = build(8, 4)
    layouts = planner.list_layouts(12)
    assert layouts
    for layout in layouts:
        args = layout.settings
        per_update = args.micro_batch_size * args.gradient_accumulation_steps  # type: ignore[operator]
        assert per_update * args.data_parallel_size == 16
        assert layout.gib <= 8
        # What is printed gives the same settings when it is typed.
        given = {"micro_batch_size": ROWS, "mixed_precision": "bf16", **layout.changes}
        again = resolve(Settings(**given), world_size=4)
        names = ("global_batch_size", "micro_batch_size", "zero_stage", "recompute_granularity")
        assert [getattr(again, n) for n in names] == [getattr(args, n) for n in names]


def test_excluded_combinations_are_not_offered() -> None:
    found = build(64, 2, fp8=True).list_layouts(20)
    assert found
    assert {layout.settings.tensor_model_parallel_size for layout in found} == {1}


def test_the_answer_says_what_fits() -> None:
    found = answer(build(12))
    assert not found["fits"] and found["run"]["updates"] == 16
    assert sum(v for k, v in found["memory"].items() if k != "host") == pytest.approx(
        found["memory_gib"], rel=1e-3
    )
    text = "\n".join(describe(found))
    assert "does not fit round (12.0 GiB each)" in text
    assert "to fit" in text and "--compile" in text
    assert "to fit" not in "\n".join(describe(answer(build(64))))


def test_rates_are_readable() -> None:
    found = answer(build(64))
    rates = {2690: "2,690 steps/s", 15_400: "15.4k steps/s", 3.75: "3.75 steps/s"}
    for rate, shown in rates.items():
        lines = describe({**found, "step_time": 1 / rate})
        assert any(shown in line for line in lines)


def test_flags_are_as_they_are_typed() -> None:
    changes = {"compile": True, "zero_1_memory_optimization": False, "recompute_granularity": None}
    assert render_flags({**changes, "micro_batch_size": 2}) == (
        "--compile --micro-batch-size 2 without --zero-1-memory-optimization "
        "--recompute-granularity"
    )
    assert GIB == 2**30
