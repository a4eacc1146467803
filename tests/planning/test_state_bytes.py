"""The state that a plan says is the state that each rank has, under the layouts of the matrix."""

from __future__ import annotations

import functools

import pytest

from rapidformer.planning.parts import Shape
from tests.parity.harness import Training
from tests.parity.matrix import LAYOUTS, STAGED_LAYOUTS
from tests.planning.states import (
    PARTS,
    count_states,
    make_training,
    measure_training,
    plan_states,
)
from tests.processes import run_in_kept_processes

CASES = {
    2: {"llama": ("ZeRO-1 2", "ZeRO-3 offload", "CP2", "PP2 1f1b")},
    4: {"llama": ("TP4", "FSDP2xTP2", "PP2xZeRO-1"), "gpt-moe": ("EP2xDP2 ZeRO-3",)},
}


@functools.cache
def measure_once(training: Training) -> Shape:
    return measure_training(training)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_bytes_of_every_rank(ranks: int) -> None:
    trainings = {name: make_training(name, is_by_row=name == "gpt-moe") for name in CASES[ranks]}
    layouts = LAYOUTS | STAGED_LAYOUTS
    asked = [(name, key) for name, keys in CASES[ranks].items() for key in keys]
    cases = [(trainings[name], layouts[key][1]) for name, key in asked]
    shapes = {name: measure_once(training) for name, training in trainings.items()}
    for found in run_in_kept_processes(count_states, ranks, cases):
        for (name, key), one in zip(asked, found, strict=True):
            assert not isinstance(one, str), one
            stage, state = one
            planned = plan_states(shapes[name], trainings[name], layouts[key][1], ranks)[stage]
            for part in PARTS:
                assert planned[part] == pytest.approx(state[part], rel=0.05), (name, key, part)
