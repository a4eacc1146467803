"""A command that does not outlive its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.commands import Command


@pytest.fixture(autouse=True)
def _without_stand_in(tmp_path: Path) -> None:
    """Scripts in this folder find a package of Megatron's name, and so need not import torch."""
    (tmp_path / "megatron.py").write_text("")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def begin(*words: object, **options: str) -> Command:
        started.append(Command(tmp_path, *words, **options))
        return started[-1]

    yield begin
    for command in started:
        command.end()
