"""One process == two, split or not, recomputed, compiled: losses and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rapidformer.engine import RapidformerEngine
from rapidformer.models import GPTModel
from rapidformer.optim.observer import observe_runs
from rapidformer.verification.recorder import Recorder, collect_weights
from rapidformer.verification.trace import Trace
from tests.parity.bare import note_bare_gradients, start_bare_trace
from tests.parity.limits import ALL, Limits, check_equal
from tests.processes import run_in_kept_processes

from .small import MODERN, make_config, make_tokens

pytestmark = pytest.mark.slow
UPDATES, MICRO_BATCHES, ROWS = 2, 4, 2
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {**MODERN, "num_experts": [1, 8]},  # a dense block, then a mixture
}
TOLERANCE = 2e-6


def build(shape: str) -> GPTModel:
    torch.manual_seed(3)
    return GPTModel(make_config(**SHAPES[shape], init_method_std=0.1))


def make_micro_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; each micro-batch has another number of labels."""
    row = make_tokens(ROWS, 13, seed=number)
    tokens, labels = row[:, :-1], row[:, 1:].clone()
    labels[0, : 1 + 2 * (number % 5)] = -100
    return tokens, labels


def compute_loss(model: nn.Module, number: int) -> tuple[torch.Tensor, int]:
    tokens, labels = make_micro_batch(number)
    output = model(tokens, None, None, labels=labels)
    losses, *moe_losses = output if isinstance(output, tuple) else (output,)
    count = int((labels != -100).sum())
    return losses.sum() / count + model.moe_loss_coeff * sum(moe_losses), count


def run_bare(shape: str) -> Trace:
    """A plain loop that knows nothing of the library."""
    model = build(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = start_bare_trace(model)
    for update in range(UPDATES):
        first = update * MICRO_BATCHES
        parts = [compute_loss(model, first + i) for i in range(MICRO_BATCHES)]
        loss = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
        loss.backward()
        note_bare_gradients(trace, model, loss)
        trace.norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = collect_weights(model)
    return trace


def run_switched(shape: str, settings: dict[str, Any]) -> Trace:
    recorder = Recorder()
    with observe_runs(recorder):
        engine = train(shape, settings)
    trace = recorder.finish()
    engine.close()
    return trace


def train(shape: str, settings: dict[str, Any]) -> RapidformerEngine:
    engine = RapidformerEngine(
        args={"micro_batch_size": ROWS, "global_batch_size": ROWS * MICRO_BATCHES,
              "clip_grad": 0.0, **settings}
    )  # fmt: skip
    model = build(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.compose(
        model, optimizer, lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    )
    for update in range(UPDATES):
        for number in range(engine.args.rank, MICRO_BATCHES, engine.args.data_parallel_size):
            loss, count = compute_loss(model, update * MICRO_BATCHES + number)
            engine.backward(loss, count)
        engine.step()
    return engine


def check(traces: list[Trace], shape: str) -> None:
    limits = {"loss": TOLERANCE, "gradient norm": TOLERANCE, "gradients": TOLERANCE}
    check_equal(run_bare(shape), traces, limits=Limits(ALL, limits))


# The dense one has tied weights; ties and dense blocks of other models are the parity suite's.
@pytest.mark.parametrize(
    ("shape", "stage"), [("dense", 3), ("experts", 0), ("experts", 1), ("experts", 3)]
)
def test_two_processes_equal_one(shape: str, stage: int) -> None:
    settings = {f"zero_{stage}_memory_optimization": True} if stage else {}
    check(run_in_kept_processes(run_switched, 2, shape, settings), shape)


def test_recompute_under_sharding_changes_nothing() -> None:
    settings = {"zero_3_memory_optimization": True, "checkpoint_activations": True}
    check(run_in_kept_processes(run_switched, 2, "experts", settings), "experts")


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_changes_nothing(granularity: str) -> None:
    check([run_switched("experts", {"recompute_granularity": granularity})], "experts")


def test_compiled_blocks_change_nothing() -> None:
    # What a backend does with a graph is torch's matter; that the blocks make one is ours.
    check([run_switched("experts", {"compile": True, "compile_backend": "eager"})], "experts")
