"""When a run logs, evaluates and saves; an interval may be a fraction of the run."""

from __future__ import annotations

import math

from rapidformer.config import Settings

OPEN_END = 2**31
"""Updates of a run over a stream: it ends with its last pass, whenever that is."""


def count_updates(interval: float, train_iters: int) -> int:
    """An interval in updates: itself, or its fraction of the run."""
    return math.ceil(interval * train_iters) if interval < 1 else int(interval)


class Timetable:
    """Answers whether something is due after an update, or after an epoch."""

    def __init__(
        self,
        args: Settings,
        *,
        train_iters: int,
        eval_interval: float | None = None,
        saves_each_epoch: bool = True,
    ) -> None:
        """``eval_interval`` is the template's default, if the user sets none."""
        self.logs_each_epoch = args.log_strategy == "epoch"
        self._logs_first = args.log_first_step and args.log_strategy != "no"
        self.log_interval = count_updates(args.log_interval, train_iters)
        self._logs_steps = args.log_strategy == "steps"
        interval = args.eval_interval or eval_interval
        evaluates = args.eval_strategy or ("steps" if interval else "epoch")
        self.evaluates = evaluates != "no"
        self._eval_interval = None
        if evaluates == "steps":
            self._eval_interval = count_updates(interval or args.log_interval, train_iters)
        self._evaluates_each_epoch = evaluates == "epoch"
        self._eval_delay = args.eval_delay
        self.evaluates_first = args.eval_on_start and self.evaluates
        saves = args.save_strategy or ("steps" if args.save_interval else "epoch")
        self.saves = args.save is not None and saves != "no"
        self.saves_best = self.saves and saves == "best"
        self._save_interval = None
        if self.saves and saves == "steps":
            interval = args.save_interval or args.log_interval
            self._save_interval = count_updates(interval, train_iters)
        asked = args.save_strategy == "epoch"
        self.saves_each_epoch = self.saves and saves == "epoch" and (asked or saves_each_epoch)

    def is_log_due(self, attempts: int, step: int) -> bool:
        """Attempts, not updates: the updates that fp16 skips are logged too."""
        if self._logs_first and step == 1:
            return True
        return self._logs_steps and attempts % self.log_interval == 0

    def is_evaluation_due(self, step: int) -> bool:
        interval = self._eval_interval
        return interval is not None and step % interval == 0 and step >= self._eval_delay

    def is_save_due(self, step: int) -> bool:
        return self._save_interval is not None and step % self._save_interval == 0

    def is_evaluation_due_after_epoch(self, epoch: float) -> bool:
        return self._evaluates_each_epoch and epoch >= self._eval_delay
