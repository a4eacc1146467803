"""Commands that do not outlive their test, alone and as nodes of one run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.commands import Command
from tests.launch.nodes import TestNode, make_two_nodes


@pytest.fixture(autouse=True)
def _without_stand_in(tmp_path: Path) -> None:
    """Scripts in this folder find a package of Megatron's name, and so need not import torch."""
    (tmp_path / "megatron.py").write_text("")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def begin(*words: object, **options: Any) -> Command:
        started.append(Command(tmp_path, *words, **options))
        return started[-1]

    yield begin
    for command in started:
        command.end()


@pytest.fixture
def nodes() -> Iterator[list[TestNode]]:
    with make_two_nodes() as made:
        yield made


@pytest.fixture
def begin(start: Callable[..., Command], nodes: list[TestNode]) -> Callable[..., Command]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def begin_node(rank: int, *words: object, **variables: Any) -> Command:
        return start(
            "launch",
            *("--device", "cpu", "--nproc-per-node", "1"),
            *words,
            namespace=nodes[rank].namespace,
            NNODES="2",
            NODE_RANK=str(rank),
            MASTER_ADDR=nodes[0].address,
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
            **nodes[rank].variables,
            **variables,
        )

    return begin_node
