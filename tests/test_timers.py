"""Megatron's stopwatches."""

from __future__ import annotations

import time

import pytest

from rapidformer.errors import RapidformerError
from rapidformer.log import configure_logging
from rapidformer.timers import Timers


def measure(timers: Timers, name: str, seconds: float = 0.02) -> None:
    timers(name).start()
    time.sleep(seconds)
    timers(name).stop()


def test_time_adds_up_until_it_is_read() -> None:
    timers = Timers()
    measure(timers, "forward")
    measure(timers, "forward")
    assert timers("forward").elapsed(reset=False) >= 0.04
    first = timers("forward").elapsed()
    assert 0.04 <= first < 1
    assert timers("forward").elapsed() == 0.0


def test_reading_a_running_timer_lets_it_go_on() -> None:
    timers = Timers()
    timers("a").start()
    time.sleep(0.01)
    assert timers("a").elapsed() >= 0.01
    time.sleep(0.01)
    timers("a").stop()
    assert 0.01 <= timers("a").elapsed() < 1


def test_names_are_kept_apart() -> None:
    timers = Timers()
    measure(timers, "a")
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


def test_log_line_is_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    timers = Timers()
    measure(timers, "forward")
    timers.log(["forward", "never"], normalizer=2, reset=False)
    text = capsys.readouterr().err.strip()
    assert text.startswith("time (ms) | forward: ")
    milliseconds = float(text.rpartition(": ")[2])
    assert milliseconds == pytest.approx(timers("forward").elapsed() * 500, abs=0.01)


def test_writing_to_a_board() -> None:
    class Board:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

    timers, board = Timers(), Board()
    measure(timers, "forward")
    timers.write(["forward"], board, iteration=7, normalizer=2)
    ((name, value, step),) = board.scalars
    assert (name, step) == ("forward-time", 7)
    assert value == pytest.approx(timers("forward").elapsed() / 2)
