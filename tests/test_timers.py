"""Megatron's stopwatches."""

from __future__ import annotations

import pytest

from rapidformer.errors import RapidformerError
from rapidformer.log import configure_logging
from rapidformer.timers import Timers
from tests.conftest import Clock


def measure(timers: Timers, clock: Clock, name: str, seconds: float = 0.25) -> None:
    timers(name).start()
    clock.now += seconds
    timers(name).stop()


def test_time_adds_up_until_it_is_read(clock: Clock) -> None:
    timers = Timers()
    measure(timers, clock, "forward")
    clock.now += 9.0
    measure(timers, clock, "forward", 0.5)
    assert timers("forward").elapsed(reset=False) == 0.75
    assert timers("forward").elapsed() == 0.75
    assert timers("forward").elapsed() == 0.0


def test_reading_a_running_timer_lets_it_continue(clock: Clock) -> None:
    timers = Timers()
    timers("a").start()
    clock.now += 0.5
    assert timers("a").elapsed() == 0.5
    clock.now += 0.25
    timers("a").stop()
    assert timers("a").elapsed() == 0.25


def test_names_are_kept_apart(clock: Clock) -> None:
    timers = Timers()
    measure(timers, clock, "a")
    assert timers("a") is timers("a")
    assert timers("b").elapsed() == 0.0


def test_misuse_is_said() -> None:
    timers = Timers()
    with pytest.raises(RapidformerError, match="timer 'a' is not running"):
        timers("a").stop()
    timers("a").start()
    with pytest.raises(RapidformerError, match="timer 'a' is already running"):
        timers("a").start()
    timers("a").reset()
    timers("a").start()


def test_log_line_is_megatrons(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    timers = Timers()
    measure(timers, clock, "forward", 0.25)
    timers.log(["forward", "never"], normalizer=2, reset=False)
    text = capsys.readouterr().err.strip()
    assert text.startswith("time (ms) | forward: ")
    assert float(text.rpartition(": ")[2]) == 125.0


def test_writing_to_a_board(clock: Clock) -> None:
    class Board:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

    timers, board = Timers(), Board()
    measure(timers, clock, "forward", 0.5)
    timers.write(["forward"], board, iteration=7, normalizer=2)
    ((name, value, step),) = board.scalars
    assert (name, step) == ("forward-time", 7)
    assert value == 0.25
