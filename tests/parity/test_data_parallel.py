"""One process == several, sharded or not, accumulated or not, on rows of unequal lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity.harness import get_difference, get_order, run_reference, run_switched
from tests.processes import run_in_processes

EPOCHS = 3
TOLERANCE = 1e-6


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Adam's default epsilon turns round-off in gradients near zero into whole steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def _settings(**more: object) -> dict[str, object]:
    return {"global_batch_size": 16, "clip_grad": 1.0, "lr": 0.1, "seed": 5, **more}


def _check(model: str, world_size: int, settings: dict[str, object], make_optimizer=make_sgd):
    order = get_order(settings, EPOCHS)
    reference = run_reference(model, order=order, make_optimizer=make_optimizer)
    if world_size == 1:
        traces = [run_switched(model, settings, make_optimizer, EPOCHS)]
    else:
        traces = run_in_processes(run_switched, world_size, model, settings, make_optimizer, EPOCHS)
    for trace in traces:
        difference = get_difference(trace, reference)
        assert difference["gradient"] < TOLERANCE, difference
        assert difference["loss"] < TOLERANCE, difference
        assert difference["weight"] < 10 * TOLERANCE, difference


@pytest.mark.parametrize("model", ["bert", "bert-mlm", "gpt2", "t5", "llama", "custom"])
def test_accumulation_equals_one_big_batch(model: str) -> None:
    _check(model, 1, _settings(micro_batch_size=2))


@pytest.mark.parametrize("model", ["bert", "bert-mlm", "gpt2", "t5", "llama", "custom"])
def test_two_processes_equal_one(model: str) -> None:
    _check(model, 2, _settings(micro_batch_size=4))


def test_four_processes_equal_one() -> None:
    _check("bert-mlm", 4, _settings(micro_batch_size=2))


def test_adamw_on_two_processes() -> None:
    _check("gpt2", 2, _settings(micro_batch_size=4), make_adamw)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["bert-mlm", "gpt2", "t5", "custom"])
def test_sharded_equals_one(model: str, stage: int) -> None:
    _check(model, 2, _settings(micro_batch_size=4, **{f"zero_{stage}_memory_optimization": True}))


def test_fsdp_is_zero_3_on_four_processes() -> None:
    _check("llama", 4, _settings(micro_batch_size=2, fsdp_memory_optimization=True), make_adamw)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_changes_nothing(granularity: str) -> None:
    _check("gpt2", 1, _settings(micro_batch_size=4, recompute_granularity=granularity))


def test_recompute_under_sharding() -> None:
    _check(
        "t5",
        2,
        _settings(micro_batch_size=4, checkpoint_activations=True, zero_3_memory_optimization=True),
    )


def test_compiled_blocks_change_nothing() -> None:
    _check("bert", 1, _settings(micro_batch_size=4, compile=True, compile_backend="aot_eager"))
