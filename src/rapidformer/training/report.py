"""Report a run while it runs: a progress bar or log lines, metrics.jsonl, other trackers.

Only rank 0 reports; the other ranks have a silent reporter. ``metrics.jsonl`` is authoritative,
everything else is a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import replace_text
from rapidformer.checkpoint.writing import writing
from rapidformer.config import Settings
from rapidformer.config.schema import get_settings, render_arguments
from rapidformer.log import get_logger
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.run_folder import ARGUMENTS_FILE
from rapidformer.training.trackers import MetricsFile, TensorBoard, TrackedRun, Tracker, TrackerList


class Reporter(Callback):
    """Reports the run to the terminal and to files."""

    def __init__(
        self,
        args: Settings,
        *,
        total_steps: int,
        resume_step: int = 0,
        speaks: bool,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._speaks = speaks
        self._total = total_steps
        self._file: MetricsFile | None = None
        self._copies: TrackerList | None = None
        self._bar: _ProgressBar | None = None
        if not speaks:
            return
        folder = None if args.save is None else Path(args.save)
        run = TrackedRun(
            name=folder.name if folder else "run",
            folder=folder,
            settings={name: getattr(args, name) for name in get_settings()},
            resume_step=resume_step,
        )
        board_folder = args.tensorboard_dir or (folder and folder / "tensorboard")
        with writing(folder or Path(board_folder or ".")):
            if folder is not None:
                self._file = MetricsFile()
                self._file.start(run)
                text = "".join(line + "\n" for line in render_arguments(args))
                replace_text(folder / ARGUMENTS_FILE, text)
            board = [TensorBoard(board_folder)] if board_folder else []
            self._copies = TrackerList([*board, *trackers], run)
        wants_bar = args.progress if args.progress is not None else sys.stderr.isatty()
        if wants_bar:
            self._bar = _ProgressBar(total_steps, resume_step)

    @property
    def shows_bar(self) -> bool:
        return self._bar is not None

    def say(self, message: str) -> None:
        """Print a line for the user."""
        if self._speaks:
            get_logger().info(message)

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        self.advance(loop.step, loop.live_loss, loop.lr)

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        is_training = not any(name.startswith(("eval_", "test_")) for name in line)
        self.log_training(line) if is_training else self.log_evaluation(line)

    def advance(self, step: int, loss: float | None, lr: float) -> None:
        """One more update is done; ``loss`` is the running mean of the last few."""
        if self._bar is not None:
            note = "" if loss is None else f"loss {loss:.4f}  lr {lr:.2e}"
            self._bar.advance(step, note)

    def log_training(self, line: dict[str, Any]) -> None:
        if not self._speaks:
            return
        self._record(line)
        if self._bar is None:
            get_logger().info(format_training_line(line, self._total))

    def log_evaluation(self, line: dict[str, Any]) -> None:
        if not self._speaks:
            return
        self._record(line)
        values = " | ".join(
            f"{key.partition('_')[2].replace('_', ' ')} {value:.4f}"
            for key, value in line.items()
            if key.startswith(("eval_", "test_")) and isinstance(value, float)
        )
        what = "test data" if any(key.startswith("test_") for key in line) else "evaluation"
        get_logger().info("%s at step %d | %s", what, line["step"], values)

    def record(self, line: dict[str, Any]) -> None:
        """Write numbers to the files only."""
        if self._speaks:
            self._record(line)

    def go_back(self, step: int) -> None:
        """Remove the lines of steps that will be repeated."""
        if self._file is not None:
            self._file.drop_after(step)

    def log_save(self, step: int, stall: float, seconds: float) -> None:
        """A checkpoint is complete: how long training waited for it, and how long it took."""
        if self._speaks:
            self._record({"step": step, "save_stall_s": stall, "save_write_s": seconds})
            get_logger().info(
                f"saved step {step} | training waited {stall:.2f} s | written in {seconds:.2f} s"
            )

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def close(self) -> None:
        self.close_bar()
        if self._file is not None:
            self._file.finish()
        if self._copies is not None:
            self._copies.finish()

    def _record(self, line: dict[str, Any]) -> None:
        values = {name: value for name, value in line.items() if name != "step"}
        if self._file is not None:
            self._file.log(values, line["step"])
        if self._copies is not None:
            self._copies.log(values, line["step"])


def format_training_line(line: dict[str, Any], total_steps: int) -> str:
    """The line for a log interval."""
    parts = [
        f"step {line['step']}/{total_steps}",
        f"epoch {line['epoch']:.2f}",
        f"loss {line['loss']:.4f}",
        *(
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in line.items()
            if name.endswith("_loss")
        ),
        f"lr {line['lr']:.2e}",
        f"grad norm {line['grad_norm']:.3f}",
        f"{line['step_time'] * 1000:.0f} ms/step",
    ]
    if "tokens_per_second" in line:
        parts.append(f"{_shorten(line['tokens_per_second'])} tokens/s")
    parts.append(f"{_shorten(line['samples_per_second'])} samples/s")
    if "padding_share" in line:
        parts.append(f"{line['padding_share'] * 100:.0f} % padding")
    if "mfu" in line:
        parts.append(f"{line['mfu'] * 100:.1f} % MFU")
    if line.get("memory_gib"):
        parts.append(f"{line['memory_gib']:.1f} GiB")
    if line.get("skipped_updates"):
        parts.append(f"{line['skipped_updates']} skipped")
    if "seconds_left" in line:
        parts.append(f"{timedelta(seconds=round(line['seconds_left']))} left")
    return " | ".join(parts)


def _shorten(number: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.1f}"


class _ProgressBar:
    """A bar on the terminal's last line; log messages scroll above it."""

    def __init__(self, total: int, start: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("training", total=total, completed=start, note="")
        self._progress.start()

    def advance(self, step: int, note: str) -> None:
        self._progress.update(self._task, completed=step, note=note)

    def close(self) -> None:
        self._progress.stop()
