"""Hook points of the training loop.

A callback is called at fixed points of the loop and may ask it, through the control, to log,
evaluate, save or stop. Our own reporting and best-model keeping are callbacks too, and run first.
The names, their order and the control's flags are those of transformers' ``TrainerCallback``.

Two rules: callbacks run on every rank and must request the same things on all of them; and nothing
in ``on_step_*`` may wait for the device (``.item()``, ``print(loss)``), which would stall every
step. ``on_log`` has the numbers, read once per log interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rapidformer.config import Settings
from rapidformer.engine import RapidformerEngine
from rapidformer.training.evaluation import Progress


class RunningLoop(Protocol):
    """The training loop as a callback sees it."""

    engine: RapidformerEngine
    args: Settings
    lr: float
    """The learning rate of the last update."""
    parts: dict[str, float]
    """What the objective shows besides the loss, in the last line of the log."""
    progress: Progress
    saves_at_once: bool
    """Whether no checkpoint is written behind training: a callback looks at the model meanwhile."""

    @property
    def train_iters(self) -> int:
        """Updates of the whole run."""

    @property
    def slots(self) -> int:
        """Tokens of this process so far, padding included."""

    @property
    def tokens(self) -> int:
        """The same without padding."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def epoch(self) -> float:
        """Epochs done, including the fraction of the current one."""

    @property
    def live_loss(self) -> float | None:
        """A running mean of the loss, if it is available without waiting for the device."""

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint now; with ``wait``, it is complete on return, or an error is raised."""

    def say(self, message: str) -> None:
        """Print a line for the user, on rank 0."""


@dataclass
class Control:
    """What the callbacks ask of the loop; each request is cleared once it is met."""

    should_training_stop: bool = False
    """End the run after this step, with the usual final evaluation, checkpoint and export."""
    should_epoch_stop: bool = False
    """Skip the rest of this epoch's data."""
    should_log: bool = False
    should_evaluate: bool = False
    """Evaluate now; ignored in a run without validation data."""
    should_save: bool = False
    """Save a checkpoint now; ignored in a run without a folder."""


class Callback:
    """Does nothing at any hook point; a subclass overrides those it needs."""

    def hears(self, hook: str) -> bool:
        """Whether anything happens at this hook point."""
        method = getattr(self, hook)
        return getattr(method, "__func__", method) is not getattr(Callback, hook)

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        """Before the first step of this process, resumed or not."""

    def on_epoch_begin(self, loop: RunningLoop, control: Control) -> None:
        """Before the first step of an epoch, or of the rest of a resumed one."""

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        """Before the forward passes of an update."""

    def on_substep_end(self, loop: RunningLoop, control: Control) -> None:
        """After each micro-batch of an update but the last; requests wait for the step's end."""

    def on_pre_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        """The gradient of the update is complete, but not yet clipped."""

    def on_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        """The weights are updated; their gradients and the learning rate are still those of it."""

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        """After an update. The control already holds what the settings ask for at this step."""

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        """Numbers were read: of training, of an evaluation (``eval_…``) or a test (``test_…``)."""

    def on_evaluate(self, loop: RunningLoop, control: Control, metrics: dict[str, float]) -> None:
        """After an evaluation; the names start with ``eval_``."""

    def on_pre_save(self, loop: RunningLoop, control: Control) -> None:
        """A checkpoint of this step begins; it may be written behind training."""

    def on_save(self, loop: RunningLoop, control: Control, folder: Path) -> None:
        """A checkpoint is complete in this folder; training may have gone on since."""

    def on_epoch_end(self, loop: RunningLoop, control: Control) -> None:
        """After the last step of an epoch, even if the run ends within it."""

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        """Everything is done: the last evaluation, the last checkpoint, the exported model."""
