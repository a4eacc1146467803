"""One process == two, split or not, recomputed, compiled: losses and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rapidformer.engine import RapidformerEngine
from rapidformer.models import GPTModel
from tests.parity.harness import Trace, _get_gradients, _get_weights, get_difference
from tests.processes import run_in_processes

from .small import MODERN, make_config, make_tokens

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
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for update in range(UPDATES):
        first = update * MICRO_BATCHES
        parts = [compute_loss(model, first + i) for i in range(MICRO_BATCHES)]
        loss = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
        loss.backward()
        gradients = gradients or _get_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trace(losses, gradients, _get_weights(model))


def run_switched(shape: str, settings: dict[str, Any]) -> Trace:
    engine = RapidformerEngine(
        args={"micro_batch_size": ROWS, "global_batch_size": ROWS * MICRO_BATCHES,
              "clip_grad": 0.0, **settings}
    )  # fmt: skip
    model = build(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = engine.compose(
        model, optimizer, lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    )
    world = engine.args.data_parallel_size
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for update in range(UPDATES):
        sums = torch.zeros(2)
        for number in range(engine.args.rank, MICRO_BATCHES, world):
            loss, count = compute_loss(model, update * MICRO_BATCHES + number)
            engine.backward(loss, count)
            sums += torch.tensor([loss.item() * count, count])
        gradients = gradients or _get_gradients(model)
        engine.step()
        if world > 1:
            torch.distributed.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))
    trace = Trace(losses, gradients, _get_weights(model))
    engine.close()
    return trace


def check(traces: list[Trace], shape: str) -> None:
    reference = run_bare(shape)
    # A key's bias shifts all scores of a query alike: its gradient is round-off alone.
    blind = [name for name in reference.gradients if name.endswith("key.bias")]
    assert all(abs(reference.gradients.pop(name)).max() < 1e-7 for name in blind)
    for trace in traces:
        assert trace.gradients.keys() == {*reference.gradients, *blind}
        assert all(abs(trace.gradients[name]).max() < 1e-7 for name in blind)
        difference = get_difference(trace, reference)
        assert max(difference.values()) < TOLERANCE, difference


# The dense one has tied weights; ties and dense blocks of other models are the parity suite's.
@pytest.mark.parametrize(
    ("shape", "stage"), [("dense", 3), ("experts", 0), ("experts", 1), ("experts", 3)]
)
def test_two_processes_equal_one(shape: str, stage: int) -> None:
    settings = {f"zero_{stage}_memory_optimization": True} if stage else {}
    check(run_in_processes(run_switched, 2, shape, settings), shape)


def test_recompute_under_sharding_changes_nothing() -> None:
    settings = {"zero_3_memory_optimization": True, "checkpoint_activations": True}
    check(run_in_processes(run_switched, 2, "experts", settings), "experts")


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_changes_nothing(granularity: str) -> None:
    check([run_switched("experts", {"recompute_granularity": granularity})], "experts")


def test_compiled_blocks_change_nothing() -> None:
    # What a backend does with a graph is torch's matter; that the blocks make one is ours.
    check([run_switched("experts", {"compile": True, "compile_backend": "eager"})], "experts")
