"""Ctrl-C and SIGTERM: the first one saves and says so, the second one ends at once."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.dist.processes import start_processes
from rapidformer.log import configure_logging
from rapidformer.training.stop_signals import StopSignals
from tests.processes import run_in_processes
from tests.training.test_templates import LineFinetuner, make_engine

CPU = torch.device("cpu")


class Interrupted(LineFinetuner):
    """Gets a signal in its third forward pass."""

    number = signal.SIGINT
    calls = 0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), self.number)
        return super().run_forward_step(batch, model)


def train(folder: Path, number: signal.Signals) -> None:
    trainer = Interrupted(make_engine(epochs=3, save=str(folder)))
    trainer.number = number
    configure_logging("info")
    trainer.train()


def test_ctrl_c_saves_and_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="reported"):
        train(tmp_path, signal.SIGINT)
    said = capsys.readouterr().err
    assert "Ctrl-C: training finishes this step, saves a checkpoint and stops." in said
    assert "A second signal stops at once." in said
    assert (
        f"stopped by Ctrl-C at step 3: resume with the same command and --load {tmp_path}" in said
    )
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_saves_and_keeps_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path, signal.SIGTERM)
    assert stopped.value.code == 143
    assert "stopped by SIGTERM at step 3" in capsys.readouterr().err
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_a_second_ctrl_c_ends_at_once() -> None:
    said: list[str] = []
    with StopSignals(said.append, CPU, saves=True, is_alone=True) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.caught == signal.SIGINT and len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def _train_until_stopped() -> tuple[int, str]:
    """Only the second rank gets the signal."""
    rank = start_processes(device="cpu").rank
    with StopSignals(print, CPU, saves=True, is_alone=False) as signals:
        for step in itertools.count(1):
            dist.barrier()
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            signals.look(step, asks_others=step % 4 == 0)
            if signals.is_agreed:
                break
    return step, signals.name


def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step() -> None:
    first, second = run_in_processes(_train_until_stopped, 2)
    assert first == second == (6, "SIGTERM"), "two steps after the other rank has asked"


def test_one_of_several_ranks_leaves_ctrl_c_to_the_launcher() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals(print, CPU, saves=True, is_alone=False):
        assert signal.getsignal(signal.SIGINT) is before
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
