"""Hook points of the training loop.

A callback sees the loop at fixed points and may ask it, through the control, to log, evaluate, save
or stop. The project's own reporting and best-model keeping are callbacks too, and run first. The
names, their order and the control's flags are those of transformers' ``TrainerCallback``.

Two rules. Callbacks run on every process and must ask for the same things on all of them. And
nothing in ``on_step_*`` may wait for the device (``.item()``, ``print(loss)``): it would stall
every step. ``on_log`` has the numbers, read once per log interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rapidformer.config import Settings
from rapidformer.engine import RapidformerEngine
from rapidformer.training.progress import Progress


class RunningLoop(Protocol):
    """The training loop as a callback sees it."""

    engine: RapidformerEngine
    args: Settings
    train_iters: int
    lr: float
    """The learning rate of the last update."""
    progress: Progress

    @property
    def step(self) -> int:
        """Updates done."""

    @property
    def epoch(self) -> float:
        """Epochs done, with the part of the current one."""

    @property
    def live_loss(self) -> float | None:
        """A running mean of the loss, where it can be had without waiting for the device."""

    def save(self) -> None:
        """Save a checkpoint at once; ``control.should_save`` saves after the hook."""

    def say(self, message: str) -> None:
        """A line for the person at the terminal, on the first process."""


@dataclass
class Control:
    """What the callbacks ask of the loop; each request is cleared once it is met."""

    should_training_stop: bool = False
    """End the run after this step, with everything that belongs to its end."""
    should_epoch_stop: bool = False
    """Leave the rest of this epoch's data out."""
    should_log: bool = False
    should_evaluate: bool = False
    """Evaluate now; nothing happens in a run without validation data."""
    should_save: bool = False
    """Save a checkpoint now; nothing happens in a run without a folder."""


class Callback:
    """Does nothing at any hook point; a subclass overrides those it needs."""

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        """Before the first step of this process, resumed or not."""

    def on_epoch_begin(self, loop: RunningLoop, control: Control) -> None:
        """Before the first step of an epoch, or of the rest of one that was resumed."""

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        """Before the forward passes of an update."""

    def on_pre_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        """The gradient of the update is complete, not yet clipped."""

    def on_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        """The weights and the learning rate are updated."""

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        """After an update. The control already holds what the settings ask for at this step."""

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        """Numbers were read: of training, of an evaluation (``eval_…``) or a test (``test_…``)."""

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        """After an evaluation; the names start with ``eval_``."""

    def on_save(self, loop: RunningLoop, control: Control, folder: Path) -> None:
        """A checkpoint was saved in this folder."""

    def on_epoch_end(self, loop: RunningLoop, control: Control) -> None:
        """After the last step of an epoch, also where the run ends within it."""

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        """Everything is done: the last evaluation, the last checkpoint, the exported model."""
