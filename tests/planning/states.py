"""Bytes of the training state on each rank: as a composed engine has them, and as planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rapidformer.config import arguments_from_mapping, resolve
from rapidformer.dist.processes import stop_processes
from rapidformer.dist.whole import get_shard
from rapidformer.errors import RapidformerError
from rapidformer.planning.at_hand import BlockTimer
from rapidformer.planning.layout import Layout
from rapidformer.planning.measure import measure
from rapidformer.planning.parts import Shape
from tests.parity.harness import Case, Training, compose, make_adamw, make_forward, run_updates

PARTS = ("weights", "gradients", "optimizer")
State = dict[str, int]


def plan_states(shape: Shape, training: Training, settings: Any, ranks: int) -> list[State]:
    """What a plan says for each rank of the pipeline."""
    args = resolve(arguments_from_mapping(training.get_settings(settings)), world_size=ranks)
    layout = Layout(shape, args)
    states = [layout.count_state(stage) for stage in layout.list_stages()]
    return [{part: getattr(state, part) for part in PARTS} for state in states]


def measure_training(training: Training, timer: BlockTimer | None = None) -> Shape:
    """The training's model, followed without values."""
    args = resolve(arguments_from_mapping(training.get_settings({})))

    def train() -> None:
        engine, model, loader = compose(training, {})
        run_updates(engine, model, loader)

    try:
        return measure(args, train, timer)
    finally:
        stop_processes()


def count_states(cases: list[Case]) -> list[tuple[int, State] | str]:
    """In every process: this rank's stage, and the bytes it has after an update; or a refusal."""
    torch.set_num_threads(1)
    found: list[tuple[int, State] | str] = []
    for training, settings in cases:
        try:
            found.append(_count(training, settings))
        except RapidformerError as error:
            found.append(str(error))
    return found


def _count(training: Training, settings: Any) -> tuple[int, State]:
    engine, model, loader = compose(training, settings)
    model.train()
    update = next(iter(engine.data.iterate_updates(loader)))
    engine.run_update(make_forward(model), update)
    # What ZeRO-1 and -2 leave gathered for the next micro-batch is counted as gathers.
    engine.model.parallelized.settle()
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = {"weights": _add_up(parameters), "gradients": _add_up(gradients)}
    engine.updates.optimizer.step()  # type: ignore[union-attr]
    moments = engine.updates.optimizer.state.values()  # type: ignore[union-attr]
    state["optimizer"] = _add_up(v for each in moments for v in each.values() if v.dim())
    stage = engine.runtime.topology.get_rank("pipeline")
    engine.close(gives_back=False)
    return stage, state


def _add_up(tensors: Any) -> int:
    seen: dict[int, nn.Parameter | torch.Tensor] = {id(t): t for t in tensors}
    return sum(get_shard(t).numel() * t.element_size() for t in seen.values())


def make_training(model: str, layers: int = 2, **more: Any) -> Training:
    """Of one update: another one changes neither the state nor what is measured."""
    return Training(model, layers=layers, rows=8, make_optimizer=make_adamw, **more)
