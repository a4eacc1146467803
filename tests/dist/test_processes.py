"""Processes that leave their group and join again."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from rapidformer import RapidformerEngine
from tests.processes import run_in_processes


def train_again(rounds: int) -> None:
    """Each time in a new group, while engines of earlier ones are alive; one rank leaves late."""
    engines = []
    for number in range(rounds):
        engine = RapidformerEngine(args={"lr": 0.1, "log_level": "error"})
        model, *_ = engine.compose(nn.Linear(3, 1))
        engine.backward(model(torch.ones(2, 3)).square().mean(), weight=2)
        engine.step()
        engines.append(engine)
        if dist.get_rank() == number % 2:
            time.sleep(0.1)
        dist.destroy_process_group()


def test_a_group_is_left_and_joined_again() -> None:
    """The next one found the addresses of the last one in its store, and waited for ever."""
    run_in_processes(train_again, 2, 10)
