"""When a prepared scheduler moves: as in Accelerate, also where a script goes its own way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from rapidformer import Accelerator
from rapidformer.errors import ConfigurationError
from tests.processes import run_in_kept_processes


def _prepare(accelerator: Accelerator, *, one_cycle: bool = False) -> Any:
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 1), torch.rand(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(rows), batch_size=2)
    scheduler: LRScheduler = LambdaLR(optimizer, lambda moves: 1 - moves / 100)
    if one_cycle:
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=len(loader))
    return accelerator.prepare(model, optimizer, loader, scheduler)


def _train(accelerator: Accelerator, parts: Any) -> list[float]:
    """The rate after each micro-batch of an epoch."""
    model, optimizer, loader, scheduler = parts
    rates = []
    for (rows,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).pow(2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def _train_one_cycle() -> list[float]:
    accelerator = Accelerator(cpu=True)
    return _train(accelerator, _prepare(accelerator, one_cycle=True))


def test_one_cycle_ends_where_it_was_counted_to_on_any_number_of_processes() -> None:
    """Five batches are three on each of two processes, and six moves are more than five."""
    alone = _train_one_cycle()
    for rates in run_in_kept_processes(_train_one_cycle, 2):
        assert rates == [alone[1], alone[3], alone[4]]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_scheduler_at_its_own_pace_moves_whenever_it_is_called(steps: int) -> None:
    accelerator = Accelerator(
        cpu=True, step_scheduler_with_optimizer=False, gradient_accumulation_steps=steps
    )
    rates = _train(accelerator, _prepare(accelerator))
    assert rates == pytest.approx([0.099, 0.098, 0.097, 0.096, 0.095])


def test_a_scheduler_may_be_brought_forward_before_the_first_step() -> None:
    accelerator = Accelerator(cpu=True)
    parts = _prepare(accelerator)
    for _ in range(4):
        parts[3].step()
    assert _train(accelerator, parts)[0] == pytest.approx(0.095)


def test_accumulation_over_the_end_of_an_epoch_is_refused() -> None:
    plugin = SimpleNamespace(num_steps=2, sync_with_dataloader=False)
    with pytest.raises(ConfigurationError, match="sync_with_dataloader=False is not supported"):
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
