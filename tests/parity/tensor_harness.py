"""Small models whose layers are split over processes, beside the same models in one process.

Several models go through one group of processes, one after the other: starting a group costs more
than training them. Sizes are chosen to be awkward: a vocabulary that no number of processes
divides, fewer key/value heads than processes, rows of odd lengths. Runs are recorded and compared
as ``rapidformer verify`` does it; the reference is a bare loop.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rapidformer.dist.processes import stop_processes
from rapidformer.engine import RapidformerEngine
from rapidformer.models.plan import shifts_labels
from rapidformer.optim.observer import observe_runs
from rapidformer.verification import compare as verification
from rapidformer.verification import recorder as recording
from rapidformer.verification import trace as tracing
from tests.parity.harness import build_data, collate, count_labels, cut_updates, run_bare
from tests.parity.models import (  # noqa: F401, the tests take them from here too
    GIVEN_PLANS,
    MODELS,
    PLAN,
    VOCABULARY,
    CustomAttention,
    CustomModel,
    UnplannedModel,
    build_model,
)

UPDATES = 3
ROWS = 8
SETTINGS = {
    "global_batch_size": ROWS, "micro_batch_size": 2, "lr": 0.1, "clip_grad": 1.0, "seed": 5,
    "log_level": "error",
}  # fmt: skip


@dataclass
class Trace:
    """What a run leaves behind, whole and on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first update, before clipping."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    ties: set[tuple[str, ...]] = field(default_factory=set)
    parameter_bytes: int = 0
    """Of this process alone."""
    recorded: tracing.Trace | None = None
    """The same as the library records it: gradients of all updates."""

    @classmethod
    def from_recorded(cls, recorded: tracing.Trace, losses: list[float]) -> Trace:
        return cls(
            losses=losses,
            norms=recorded.norms,
            gradients=recorded.gradients[0],
            weights=recorded.weights,
            ties={tuple(group) for group in recorded.ties},
            parameter_bytes=recorded.facts["parameter_bytes"],
            recorded=recorded,
        )

    @classmethod
    def from_bare(cls, recorded: tracing.Trace) -> Trace:
        return cls.from_recorded(recorded, [loss for loss, _ in recorded.losses])

    def to_recorded(self) -> tracing.Trace:
        """What was put together by hand, in the library's form."""
        return self.recorded or tracing.Trace(
            losses=[(loss, 1.0) for loss in self.losses],
            samples=[(0, 0) for _ in self.losses],
            norms=self.norms,
            start=self.weights,
            gradients=[self.gradients],
            weights=self.weights,
            ties=[list(group) for group in self.ties],
        )


def build_rows(name: str) -> list[dict[str, Any]]:
    if name != "vit":
        return build_data(name)[: UPDATES * ROWS]
    random = np.random.default_rng(3)
    return [
        {
            "pixel_values": torch.from_numpy(random.normal(size=(3, 16, 16)).astype(np.float32)),
            "labels": int(random.integers(0, 2)),
        }
        for _ in range(UPDATES * ROWS)
    ]


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Adam's default epsilon turns round-off in gradients near zero into whole steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)


@functools.cache
def run_one(name: str, make_optimizer: Any = make_sgd, epochs: int = 1) -> Trace:
    """The bare loop over whole global batches."""
    updates = cut_updates(build_rows(name), ROWS) * epochs
    return Trace.from_bare(run_bare(build_model(name), updates, make_optimizer))


def run_split(
    names: list[str], settings: dict[str, Any], make_optimizer: Any = make_sgd, epochs: int = 1
) -> dict[str, Trace]:
    """The same through the engine; called in every process."""
    traces = {name: run_next(name, settings, make_optimizer, epochs) for name in names}
    stop_processes()
    return traces


def run_next(
    name: str, settings: dict[str, Any], make_optimizer: Any = make_sgd, epochs: int = 1
) -> Trace:
    """One model; the processes stay together for the next one."""
    engine = RapidformerEngine(args={**SETTINGS, **settings})
    model = build_model(name)
    loader = engine.build_data_loader(build_rows(name), collate, shuffle=False)
    engine.compose(
        model,
        make_optimizer(model),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0),
        plan=GIVEN_PLANS.get(name),
    )
    return train(engine, model, loader, epochs)


def train(engine: RapidformerEngine, model: nn.Module, loader: Any, epochs: int = 1) -> Trace:
    is_shifted = shifts_labels(model) or "GPT" in type(model).__name__
    recorder = recording.Recorder()
    model.train()
    with observe_runs(recorder):
        recorder.after_compose(engine)
        for _ in range(epochs):
            for batch in loader:
                labels = batch["labels"]
                weight = count_labels(labels, is_shifted=is_shifted and labels.dim() > 1)
                engine.backward(model(**batch)["loss"], weight)
                engine.step()
    recorded = recorder.finish()
    everyone = [recorded.losses]
    group = engine.topology.get_replica_group()
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, recorded.losses, group=group)
    updates = zip(*everyone, strict=True)
    sums = [[sum(part) for part in zip(*parts, strict=True)] for parts in updates]
    return Trace.from_recorded(recorded, [total / weight for total, weight in sums])


# ---- looking at models ---------------------------------------------------------------------------


get_gradients = recording.collect_gradients
get_weights = recording.collect_weights
count_bytes = recording.count_bytes


def find_ties(model: nn.Module) -> set[tuple[str, ...]]:
    return {tuple(group) for group in recording.find_ties(model)}


def compare(mine: Trace, reference: Trace) -> dict[str, tuple[float, str]]:
    """The worst relative difference of each kind, with the parameter or update it was met in."""
    assert mine.gradients.keys() == reference.gradients.keys()
    found = verification.compare(reference.to_recorded(), [alone(mine.to_recorded(), mine.losses)])
    assert not found.problems, found.problems
    kinds = {
        "loss": "loss", "norm": "gradient norm", "gradient": "gradients",
        "weight": "updated weights",
    }  # fmt: skip
    worst = {kind: found.quantities[name].worst for kind, name in kinds.items()}
    return {kind: (each.value, each.locate()) for kind, each in worst.items()}


def alone(recorded: tracing.Trace, losses: list[float]) -> tracing.Trace:
    """One process's view, with the losses of all of them."""
    place = dict.fromkeys(tracing.AXES, 0)
    return replace(recorded, place=place, losses=[(loss, 1.0) for loss in losses])
