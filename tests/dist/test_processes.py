"""Processes that leave their group and join again."""

from __future__ import annotations

import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn

from rapidformer import RapidformerEngine
from rapidformer.dist.processes import start_processes
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


def find_local_rank() -> int:
    """On two machines, in a group of the script's own."""
    rank, world_size, _ = (
        int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    socket.gethostname = lambda: f"machine-{rank // 2}"
    return start_processes(device="cpu").local_rank


def test_each_machine_has_a_first_process() -> None:
    assert run_in_processes(find_local_rank, 4) == [0, 1, 0, 1]
