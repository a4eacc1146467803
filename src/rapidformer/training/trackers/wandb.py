"""Weights & Biases. Without a login or a network, its files stay in the run's folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from rapidformer.log import get_logger
from rapidformer.training.trackers.background import PATIENCE
from rapidformer.training.trackers.tracker import SentPoints, TrackedRun, name_by_phase

_STEP = "train/global_step"


class WandbTracker:
    """One wandb run; a resumed run continues it."""

    has_failed = False

    def __init__(self, rename: Callable[[str], str] = name_by_phase, **options: Any) -> None:
        """``options`` go to ``wandb.init``."""
        import wandb  # here, in the main thread: imports of two threads may meet halfway

        self._wandb, self._rename, self._options = wandb, rename, options
        self.handle: Any = None
        """wandb's run."""
        self._is_ours = True
        self._sent = SentPoints()

    def start(self, run: TrackedRun) -> None:
        if self._wandb.run is not None:  # a script has started it
            self.handle, self._is_ours = self._wandb.run, False
        else:
            self.handle = self._begin(run)
            run.remember("wandb", self.handle.id)
        self.handle.config.update(dict(run.settings), allow_val_change=True)
        if self._rename is name_by_phase:
            self.handle.define_metric(_STEP)
            self.handle.define_metric("*", step_metric=_STEP, step_sync=True)
        if self._rename is name_by_phase and self._is_ours:
            self._catch_up(run)

    def _catch_up(self, run: TrackedRun) -> None:
        """Send what the interrupted run had logged and wandb has not got.

        Offline nothing is known of its earlier file, of which a kill loses the end: the new file
        gets everything, so that it alone has the whole run.
        """
        last = self.handle.summary.get(_STEP) if self.handle.resumed else None
        self._sent = SentPoints(everything=-1 if last is None else int(last))
        for values, step in run.read_earlier():
            self.log(values, step)

    def _begin(self, run: TrackedRun) -> Any:
        earlier = run.recall("wandb")
        options = {
            "project": run.asked_project or os.environ.get("WANDB_PROJECT") or run.project,
            "name": run.asked_name or os.environ.get("WANDB_NAME") or run.name,
            "id": earlier or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
            "resume": "allow",
            "dir": os.environ.get("WANDB_DIR") or str(run.tracker_folder),
            **self._options,
        }
        run.tracker_folder.mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(finish_timeout=PATIENCE, init_timeout=60, silent=True)
        if "mode" in options or os.environ.get("WANDB_MODE"):
            return self._wandb.init(**options, settings=settings)
        try:
            reason = "there is no login: `wandb login`"
            if self._wandb.login(prompt=False, verify=False):
                begun = self._wandb.init(**options, settings=settings)
                get_logger().info(f"wandb     {begun.url}")
                return begun
        except Exception as error:  # a wrong key, or no way to the server
            reason = " ".join(str(error).split())
        begun = self._wandb.init(**options, settings=settings, mode="offline")
        folder = os.path.dirname(begun.dir)  # noqa: PTH120 - wandb's path, printed only
        get_logger().info(f"wandb is offline ({reason}); upload later: wandb sync {folder}")
        return begun

    def log(self, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
        named = {self._rename(name): value for name, value in values.items()}
        if self._rename is not name_by_phase:  # a script's own names, and its own steps
            self.handle.log(named, step=step, **options)
        elif new := self._sent.drop_from(named, step):
            self.handle.log({**new, _STEP: step}, **options)

    def finish(self) -> None:
        if self._is_ours:
            self.handle.finish(exit_code=int(self.has_failed))
