"""Loops as users write them, on several ranks and in one process, over the same rows.

A case is a function that trains a composed model and returns the numbers it has looked at; the
rows of a global batch are dealt out over the data-parallel ranks. Several cases go through one
group of processes: starting a group costs more than training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer.dist.collectives import gather_objects
from rapidformer.engine import RapidformerEngine
from rapidformer.verification.recorder import collect_weights
from tests.parity.harness import keep_rate, make_sgd
from tests.parity.models import build_model
from tests.processes import run_in_kept_processes

ROWS = 8
SETTINGS = {
    "global_batch_size": ROWS, "lr": 0.1, "clip_grad": 0.0, "seed": 5, "log_level": "error",
    "dynamic_shape": "off",  # there is no padding
}  # fmt: skip


@dataclass
class Loop:
    """What a case has to train with."""

    engine: RapidformerEngine
    model: Any
    optimizer: torch.optim.Optimizer
    values: list[float] = field(default_factory=list)
    """Whatever the case has noted: equal on all ranks, or summed over them."""

    def get_batch(self, number: int) -> dict[str, torch.Tensor]:
        """This rank's rows of a global batch."""
        random = np.random.default_rng(number)
        ids = torch.from_numpy(random.integers(1, 64, (ROWS, 6)))
        topology = self.engine.runtime.topology
        rank, size = topology.get_rank("data"), topology.get_size("data")
        mine = ids[rank::size]
        return {"input_ids": mine, "attention_mask": torch.ones_like(mine), "labels": mine}

    def compute_loss(self, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.get_batch(number))["loss"]
        return loss

    def note_mean(self, loss: torch.Tensor) -> None:
        """Note a loss over this rank's rows as one over the whole batch."""
        everyone = gather_objects(float(loss.detach()), self.engine.runtime.topology)
        self.values.append(sum(everyone) / len(everyone))


Case = Callable[[Loop], None]


@dataclass
class Outcome:
    values: list[float]
    weights: dict[str, np.ndarray]
    error: str = ""


def run_case(
    case: Case,
    settings: dict[str, Any],
    *,
    model_name: str = "small-plain",
    make_model: Callable[[], nn.Module] | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Outcome:
    """Compose a model, let the case train it, and collect its weights."""
    engine = RapidformerEngine(args={**SETTINGS, **settings})
    size = engine.runtime.topology.get_size("data")
    engine.updates.clock.rounds_per_update = 1
    assert ROWS % size == 0
    model = make_model() if make_model else build_model(model_name)
    optimizer = (make_optimizer or make_sgd)(model)
    try:
        engine.compose(model, optimizer, keep_rate)
        model.train()
        loop = Loop(engine, model, optimizer)
        case(loop)
    except Exception as error:  # told to the test, which matches it
        return Outcome([], {}, f"{type(error).__name__}: {error}")
    engine.model.parallelized.settle()
    return Outcome(loop.values, collect_weights(model))


Run = tuple[Case, dict[str, Any], dict[str, Any]]
"""A case, the settings and how else to call ``run_case``."""


def run_all(runs: list[Run]) -> list[Outcome]:
    return [run_case(case, settings, **options) for case, settings, options in runs]


def run_on_ranks(runs: list[Run], world_size: int = 2) -> list[list[Outcome]]:
    """The outcomes of every run, one for each rank."""
    everyone = run_in_kept_processes(run_all, world_size, runs)
    return [list(outcomes) for outcomes in zip(*everyone, strict=True)]


def assert_same(runs: list[Run], world_size: int = 2, *, tolerance: float = 2e-5) -> None:
    """Every run on several ranks gives what the same case gives in one process."""
    alone: dict[str, Outcome] = {}
    for (case, settings, options), outcomes in zip(
        runs, run_on_ranks(runs, world_size), strict=True
    ):
        key = f"{case} {options}"
        if key not in alone:
            alone[key] = run_case(case, {}, **options)
        expected = alone[key]
        assert not expected.error, expected.error
        for rank, outcome in enumerate(outcomes):
            where = f"{case.__name__} under {settings} {options} on rank {rank}"
            assert not outcome.error, f"{where}: {outcome.error}"
            np.testing.assert_allclose(
                outcome.values, expected.values, rtol=tolerance, atol=tolerance, err_msg=where
            )
            for name, weight in expected.weights.items():
                np.testing.assert_allclose(
                    outcome.weights[name], weight, rtol=tolerance, atol=tolerance,
                    err_msg=f"{name} of {where}",
                )  # fmt: skip


TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2}
