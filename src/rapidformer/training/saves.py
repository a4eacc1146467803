"""Which state of a loop has a checkpoint; one in the background is reported when complete."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rapidformer.dist.collectives import broadcast_object
from rapidformer.engine import RapidformerEngine
from rapidformer.training.evaluation import Progress
from rapidformer.training.report import Reporter


class Saves:
    """Starts one save at a time, and reports each once it is complete."""

    def __init__(
        self, engine: RapidformerEngine, reporter: Reporter, notify: Callable[..., None]
    ) -> None:
        """``notify`` calls a hook: of the start of each save, and with the complete folder."""
        self._engine, self._reporter, self._notify = engine, reporter, notify
        self.step: int | None = None
        """The step that has a checkpoint, whatever its progress was."""
        self._progress: Progress | None = None
        self._stall: float | None = None
        """Seconds that training waited for the save that has not been reported yet, if any."""
        self._is_prepared = False

    def prepare(self) -> None:
        """Let the engine prepare for saves; only the first call does anything."""
        if not self._is_prepared:
            self._is_prepared = True
            self._engine.checkpoints.prepare_saves()

    def has_state(self, step: int, progress: Progress) -> bool:
        """Whether there is a checkpoint of this step with this progress."""
        return self.step == step and self._progress == progress

    def remember(self, step: int, progress: Progress) -> None:
        """Note a state that a checkpoint has: one that was restored or is being written."""
        self.step, self._progress = step, Progress(**dataclasses.asdict(progress))

    def start(
        self,
        step: int,
        progress: Progress,
        extra: dict[str, Any],
        *,
        protected: Path | None,
        processor: Any,
        wait: bool,
    ) -> None:
        """Save this state after the last save; without ``wait``, maybe in the background."""
        started = time.monotonic()
        self.finish()
        self._notify("on_pre_save")
        self.remember(step, progress)
        self._engine.save_checkpoint(
            extra={"progress": dataclasses.asdict(progress), **extra},
            protected=protected,
            processor=processor,
            wait=wait,
        )
        self._stall = time.monotonic() - started
        if self._engine.checkpoints.background.save is None:
            self.finish()

    def finish(self) -> None:
        """Wait for the last save, and report it unless that has been done."""
        stall, self._stall = self._stall, None
        if stall is None:
            return
        self._engine.checkpoints.wait_for_save()
        save = self._engine.checkpoints.take_save()
        if save is None:
            self.step = None
            return
        if save.is_behind or stall > 1:
            self._reporter.log_save(save.step, stall, save.write_seconds)
        self._notify("on_save", save.target)

    def report_if_written(self) -> None:
        """Report a save that is complete by now; rank 0 decides, so that all ranks do."""
        background = self._engine.checkpoints.background
        if background.save is not None and broadcast_object(background.is_done):
            self.finish()

    def give_up(self, error: BaseException) -> None:
        """Let a save be completed before the run fails; a second Ctrl-C does not wait for it."""
        if isinstance(error, KeyboardInterrupt):
            self._engine.checkpoints.background.cancel()
        with suppress(Exception):
            self.finish()
