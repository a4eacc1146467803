"""A step never reads a value from the device: the host would wait until everything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer.training.callbacks import Callback, Control, RunningLoop
from tests.training.test_templates import LineFinetuner, make_engine

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}


class Refusing(TorchDispatchMode):
    """Raises if a number is read from a tensor: ``.item()``, ``float()``, ``if tensor``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} in a step"
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Refuses reads from the begin of each step to the end of its update, but for the first."""

    def __init__(self) -> None:
        self.steps = 0
        self._mode: Refusing | None = None

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        if loop.step > 0:
            self._mode = Refusing()
            self._mode.__enter__()

    def on_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
            self.steps += 1


class ReadingFinetuner(LineFinetuner):
    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch)
        loss.item()
        return loss


def train(finetuner: type[LineFinetuner]) -> int:
    engine = make_engine(
        global_batch_size=8, clip_grad=0.1, optimizer="adam", epochs=1, log_interval=100
    )
    watch = Watch()
    try:
        trainer = finetuner(engine)
        trainer.callbacks = [watch]
        trainer.train()
    finally:
        if watch._mode is not None:
            watch._mode.__exit__(None, None, None)
        engine.close()
    return watch.steps


def test_accumulating_clipping_and_updating_read_nothing() -> None:
    assert train(LineFinetuner) == 4


def test_a_read_in_the_forward_step_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"_local_scalar_dense.* in a step"):
        train(ReadingFinetuner)
