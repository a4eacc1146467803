"""ZeRO with whole weights at fixed places, as CUDA graphs need them: the result of one process.

Nothing is replayed here: a stand-in for the graphs gathers the weights, and the passes run as they
are. So these are the exchanges that surround a replay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.sharding.placed_weights import PlacedWeights
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.dist.whole import join_whole
from rapidformer.engine import RapidformerEngine
from rapidformer.models.side_effects.examination import Examination
from rapidformer.verification.trace import Trace
from tests.parity.harness import (
    Case,
    Training,
    check_case,
    compose,
    make_forward,
    make_sgd,
    train,
    under,
    zero,
)
from tests.parity.limits import SHARD_LIMITS
from tests.processes import run_in_kept_processes


class Gathers(GraphedPasses):
    """Gathers the weights for every update, and replays none."""

    def __init__(self, placed: PlacedWeights) -> None:
        self.placed, self.problem, self.finishing = placed, None, None

    @property
    def in_pieces(self) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        assert self.placed is not None
        self.placed.gather()
        self.placed.use()

    def close(self) -> None:
        assert self.placed is not None
        self.placed.close_places()


def place(engine: RapidformerEngine) -> PlacedWeights:
    synchronizer = engine.model.parallelized.synchronizer
    assert isinstance(synchronizer, ShardedGradients)
    placed = synchronizer.place_weights()
    engine.updates.graphs = Gathers(placed)
    return placed


def run_case(case: Case) -> Trace:
    engine, model, loader = compose(*case)
    placed, compute, places = place(engine), make_forward(model), list[list[int]]()

    def forward(batch: Any) -> Any:
        places.append([parameter.data_ptr() for parameter in placed.parameters])
        return compute(batch)

    def run_epoch(engine: RapidformerEngine, model: Any, loader: Any) -> None:
        for update in engine.data.iterate_updates(loader):
            engine.run_update(forward, update)
            engine.step()

    trace = train(engine, model, loader, run_epoch=run_epoch)
    engine.close()
    assert all(each == places[0] for each in places)
    return trace


def run_cases(cases: list[Case]) -> list[Trace]:
    return [run_case(case) for case in cases]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "more"), [(2, {}), (4, {"hybrid_sharding_size": 2, "micro_batch_size": 1})]
)
def test_every_kind_of_model(world_size: int, more: dict[str, Any], stage: int) -> None:
    """Tied weights, two stacks, adapters of a frozen model; copies of shards, and accumulation."""
    names = ["gpt2", "t5", "gpt2-lora", "bert"] if world_size == 2 else ["qwen3"]
    cases = under(zero(stage, **more), *names)
    everyone = run_in_kept_processes(run_cases, world_size, cases)
    for (training, settings), traces in zip(cases, zip(*everyone, strict=True), strict=True):
        where = f"{training.model} under {settings}"
        check_case(training, list(traces), SHARD_LIMITS, where=where)


TRAINING = Training("gpt2", make_optimizer=make_sgd, rows=16, global_batch_size=4)


def interrupt(stage: int) -> tuple[Trace, list[float], int]:
    """Evaluate between updates, let one fail, and go on without placed weights."""
    engine, model, loader = compose(TRAINING, zero(stage))
    placed, forward, losses = place(engine), make_forward(model), list[float]()
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}

    def fail(batch: Any) -> Any:
        forward(batch)
        raise KeyError("a mistake in the forward step")

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            losses.append(float(model(**batch)["loss"]))
        model.train()

    def fail_in_a_block(module: Any, inputs: Any) -> None:
        raise KeyError("a mistake in the model")

    def run_epoch(engine: RapidformerEngine, model: Any, loader: Any) -> None:
        for number, update in enumerate(engine.data.iterate_updates(loader)):
            if number == 1:
                with pytest.raises(KeyError):
                    engine.run_update(fail, update)
                assert not placed.is_gathered
                hook = model.transformer.h[-1].register_forward_pre_hook(fail_in_a_block)
                with pytest.raises(KeyError):
                    evaluate()
                hook.remove()
            if number == 2:
                placed.close_places()
                engine.updates.graphs = None
            evaluate()
            engine.run_update(forward, update)
            engine.step()
        evaluate()

    trace = train(engine, model, loader, run_epoch=run_epoch)
    kept = sum(parameter.untyped_storage().size() for parameter in placed.parameters)
    engine.close()
    return trace, losses, kept


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_evaluation_errors_and_the_end(stage: int) -> None:
    """The model has its shards after every update, and after one that failed."""
    (trace, losses, kept), other = run_in_kept_processes(interrupt, 2, stage)
    assert losses == other[1]
    assert len(set(losses)) == len(losses) > 3, "each evaluation must see the updated weights"
    assert kept == other[2] == 0
    check_case(TRAINING, [trace, other[0]], SHARD_LIMITS)


def run_twice(stage: int, is_placed: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Two losses of each micro-batch, computed first and back-propagated one after the other.

    The first block is unfrozen by the second step, and frozen again by the sixth one.
    """
    engine, model, loader = compose(TRAINING, zero(stage))
    steps = 0
    if is_placed:
        place(engine)
    forward, norms = make_forward(model), list[float]()
    model.train()

    def step(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        model.transformer.h[0].requires_grad_(1 < steps < 6)
        first, second = forward(batch)[0], forward(batch)[0]
        engine.updates.backward_within(first)
        engine.updates.backward_within(2 * second)
        return first

    for update in engine.data.iterate_updates(loader):
        engine.run_update(step, update)
        gradients = [join_whole(p.grad) for p in engine.model.parameters if p.grad is not None]
        norms.append(float(torch.stack([g.square().sum() for g in gradients]).sum()))
        engine.step()
    weights = [join_whole(p).clone() for p in engine.model.parameters]
    engine.close()
    return norms, weights


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_backward_passes_of_one_forward_step(stage: int) -> None:
    """The second one ends after the first has been reduced: its gradients are reduced, too."""
    for norms, weights in run_in_kept_processes(run_twice, 2, stage, True):
        expected = run_in_kept_processes(run_twice, 2, stage, False)[0]
        assert norms == expected[0]
        assert all(map(torch.equal, weights, expected[1]))


def examine_a_sharded_teacher() -> str:
    engine, model, _ = compose(TRAINING, zero(1))
    other, teacher, _ = compose(TRAINING, zero(1))
    teacher.requires_grad_(False)

    def step(batch: Any) -> Any:
        return model(**batch)["loss"] + teacher(**batch)["loss"]

    effect = Examination([step], model).effect
    engine.close()
    other.close()
    return str(effect)


def test_another_sharded_model_in_the_step_is_a_reason_not_to_replay() -> None:
    """It gathers its weights in every call: a rank that records would do so more often."""
    for effect in run_in_kept_processes(examine_a_sharded_teacher, 2):
        assert "calls a GPT2LMHeadModel whose weights ranks gather together" in effect
        assert "compose that model without ZeRO" in effect
