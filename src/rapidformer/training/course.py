"""How far a run has come: what is due after an update or an epoch, and whether it is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rapidformer.data.loader import DistributedLoader
from rapidformer.dist.collectives import broadcast_object
from rapidformer.engine import RapidformerEngine
from rapidformer.training.callbacks import Control
from rapidformer.training.run_folder import LAST
from rapidformer.training.timetable import OPEN_END, Timetable


class Course:
    """Counts the attempts of a run, and asks its timetable what they make due.

    Attempts, not updates, decide when a run is over: skipped updates consume data, too.
    """

    def __init__(
        self,
        engine: RapidformerEngine,
        loader: DistributedLoader,
        timetable: Timetable,
        train_iters: int,
    ) -> None:
        self.train_iters = train_iters
        self._engine, self._loader, self._timetable = engine, loader, timetable
        self.attempts = self._step_before = self.step
        self._started_at = time.monotonic()

    @property
    def step(self) -> int:
        """Updates done."""
        return self._engine.updates.clock.updates

    @property
    def epoch(self) -> float:
        """Epochs done, including the fraction of the current one."""
        return self._loader.count_epochs_done()

    @property
    def place(self) -> dict[str, Any]:
        """What each line of the log begins with."""
        return {"step": self.step, "epoch": round(self.epoch, 4)}

    @property
    def is_complete(self) -> bool:
        """Whether all attempts are made; of a run that ends with its passes, see ``has_passed``."""
        return self.attempts >= self.train_iters

    @property
    def has_passed(self) -> bool:
        """Whether the passes are done; attempts do not tell if an epoch was ended early."""
        args = self._engine.args
        counts = args.epochs is not None and not (args.train_iters or args.train_samples)
        is_counting = counts or self.train_iters == OPEN_END
        return is_counting and self._loader.epoch >= (args.epochs or 1)

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.has_passed

    @property
    def is_finished(self) -> bool:
        """Whether a restored run has done all of its updates and written the final model."""
        source = self._engine.checkpoints.resumed_from
        if not self.is_over:
            return False
        if self._engine.args.save is None or source is None:
            return True
        last = Path(self._engine.args.save) / LAST
        # A run may have died after its last checkpoint. An older one is an earlier, shorter run's.
        is_newer = last.is_dir() and last.stat().st_mtime >= source.stat().st_mtime
        return bool(broadcast_object(is_newer))

    @property
    def attempts_left(self) -> int | None:
        """None if the end is not known."""
        return None if self.train_iters == OPEN_END else self.train_iters - self.attempts

    def is_anything_due(self) -> bool:
        """Whether something comes next that needs to know if the last update was good."""
        timetable, step = self._timetable, self.step
        return (
            self.is_over
            or timetable.is_log_due(self.attempts, step)
            or timetable.is_evaluation_due(step)
            or timetable.is_save_due(step)
            or self._is_exit_due()
        )

    def note_step(self) -> None:
        """What is due at this step is not due again."""
        self._step_before = self.step

    def request_after_update(self, control: Control) -> bool:
        """Request what is due now according to the settings; False if the update was skipped."""
        timetable = self._timetable
        control.should_log |= timetable.is_log_due(self.attempts, self.step)
        if self.step == self._step_before:
            return False  # nothing else is due
        self.note_step()
        control.should_evaluate |= timetable.is_evaluation_due(self.step)
        control.should_save |= timetable.is_save_due(self.step)
        control.should_training_stop |= self._is_exit_due()
        limit = self._engine.args.exit_duration_in_mins
        if limit is not None and self.attempts % timetable.log_interval == 0:
            is_late = (time.monotonic() - self._started_at) / 60 > limit
            control.should_training_stop |= broadcast_object(is_late)
        return True

    def request_after_epoch(self, control: Control) -> None:
        timetable = self._timetable
        control.should_log |= timetable.logs_each_epoch
        control.should_evaluate |= timetable.is_evaluation_due_after_epoch(self.epoch)
        control.should_save |= timetable.saves_each_epoch

    def _is_exit_due(self) -> bool:
        interval = self._engine.args.exit_interval
        return bool(interval and self.step % interval == 0)
