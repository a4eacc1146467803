"""Report a run while it runs: a bar or log lines, metrics.jsonl and its copies; on rank 0 only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.checkpoint.finding import ARGUMENTS_FILE
from rapidformer.checkpoint.publish import replace_text
from rapidformer.checkpoint.writing import writing
from rapidformer.config import Settings
from rapidformer.config.schema import get_settings, render_arguments
from rapidformer.config.tracker_names import list_named
from rapidformer.engine import RapidformerEngine
from rapidformer.log import get_logger
from rapidformer.overlay import find_fact
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.timetable import OPEN_END
from rapidformer.training.trackers import (
    Background,
    MetricsFile,
    TensorBoard,
    TrackedRun,
    Tracker,
    TrackerList,
)
from rapidformer.training.trackers.build import build_trackers

_SHOWN = ("_loss", "accuracy", "/accuracies", "reward", "kl")
"""Endings of the parts of a loss that are printed beside it."""


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
        facts: Mapping[str, Any] = MappingProxyType({}),
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """``trackers`` come on top of those of --report-to; ``facts`` are about the model."""
        self._speaks = speaks
        self._total = total_steps
        self._file: MetricsFile | None = None
        self._copies: TrackerList | None = None
        self._bar: Any = None
        if not speaks:
            return
        folder = None if args.save is None else Path(args.save)
        run = TrackedRun(
            name=args.run_name or (folder.name if folder else "run"),
            folder=folder,
            settings={**facts, **_list_settings(args, facts)},
            resume_step=resume_step,
            check_folder=check_folder,
            asked_name=args.run_name,
            asked_project=args.project,
        )
        board_folder: Any = args.tensorboard_dir
        if board_folder is None and folder and "tensorboard" in list_named(args.report_to):
            board_folder = folder / "tensorboard"
        with writing(folder or Path(board_folder or ".")):
            if folder is not None:
                self._file = MetricsFile()
                self._file.start(run)
                text = "".join(line + "\n" for line in render_arguments(args))
                replace_text(folder / ARGUMENTS_FILE, text)
            board = [TensorBoard(board_folder)] if board_folder else []
            named = build_trackers(args.report_to)
            self._copies = TrackerList([*board, *named, *map(Background, trackers)], run)
        if args.progress if args.progress is not None else sys.stderr.isatty():
            self._bar = _start_bar(total_steps, resume_step)

    @property
    def shows_bar(self) -> bool:
        return self._bar is not None

    def say(self, message: str) -> None:
        if self._speaks:
            get_logger().info(message)

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        self.advance(loop.step, loop.live_loss, loop.lr)

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        self.log(line)

    def advance(self, step: int, loss: float | None, lr: float) -> None:
        """One more update is done; ``loss`` is the running mean of the last few."""
        if self._bar is not None:
            note = "" if loss is None else f"loss {loss:.4f}  lr {lr:.2e}"
            self._bar.update(self._bar.task_ids[0], completed=step, note=note)

    def log(self, line: dict[str, Any]) -> None:
        """The numbers of training, of an evaluation or of a test."""
        self.record(line)
        results = {key: v for key, v in line.items() if key.startswith(("eval_", "test_"))}
        if results:
            values = " | ".join(
                f"{key.partition('_')[2].replace('_', ' ')} {value:.4f}"
                for key, value in results.items()
                if isinstance(value, float)
            )
            what = "test data" if any(key.startswith("test_") for key in results) else "evaluation"
            self.say(f"{what} at step {line['step']} | {values}")
        elif self._bar is None and "lr" in line:  # not an evaluation that has measured nothing
            self.say(format_training_line(line, self._total))

    def record(self, line: dict[str, Any]) -> None:
        """Write numbers to the files only."""
        values = {name: value for name, value in line.items() if name != "step"}
        for tracker in (self._file, self._copies):
            if tracker is not None:
                tracker.log(values, line["step"])

    def go_back(self, step: int) -> None:
        """Remove the lines of steps that will be repeated."""
        if self._file is not None:
            self._file.drop_after(step)

    def log_save(self, step: int, stall: float, seconds: float) -> None:
        """A checkpoint is complete: how long training waited for it, and how long it took."""
        self.record({"step": step, "save_stall_s": stall, "save_write_s": seconds})
        self.say(f"saved step {step} | training waited {stall:.2f} s | written in {seconds:.2f} s")

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def close(self) -> None:
        self.close_bar()
        for tracker in (self._file, self._copies):
            if tracker is not None:
                tracker.finish()


def _list_settings(args: Settings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """By name; one that is not given does not hide what the model's own configuration says."""
    values = {name: getattr(args, name) for name in get_settings()}
    return {n: value for n, value in values.items() if value is not None or n not in facts}


def format_training_line(line: dict[str, Any], total_steps: int) -> str:
    """The line for a log interval."""
    parts = [
        f"step {line['step']}" + (f"/{total_steps}" if total_steps != OPEN_END else ""),
        f"epoch {line['epoch']:.2f}",
        f"loss {line['loss']:.4f}",
        *(
            f"{name.replace('_', ' ').rpartition('/')[2]} {value:.4f}"
            for name, value in line.items()
            if name.endswith(_SHOWN)
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


def _start_bar(total: int, start: int) -> Any:
    """A bar on the terminal's last line; log messages scroll above it."""
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("training"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), progress.TextColumn("left"),
        progress.TextColumn("{task.fields[note]}"), console=Console(stderr=True),
    )  # fmt: skip
    known = None if total == OPEN_END else total
    bar.add_task("training", total=known, completed=start, note="")
    bar.start()
    return bar


def list_reports(engine: RapidformerEngine) -> list[Callback]:
    """What says how blocks are compiled and steps replayed, if they may be."""
    compiled = find_fact(engine.model.parallelized.model, CompiledBlocks)
    graphs = engine.updates.graphs
    return [
        *([CompileReport(compiled)] if compiled is not None else []),
        *([GraphReport(graphs)] if graphs is not None else []),
    ]


class CompileReport(Callback):
    """Says ``compiled  2 graphs in 11.3 s, 0 recompilations``, again if more were needed later."""

    def __init__(self, blocks: CompiledBlocks) -> None:
        self._blocks = blocks
        self._graphs_before = 0
        self._graphs_reported: int | None = None

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        graphs = self._blocks.graphs
        if graphs == self._graphs_before and graphs != self._graphs_reported:
            loop.say(f"compiled  {self._blocks.describe()}")
            self._graphs_reported = graphs
        self._graphs_before = graphs


class GraphReport(Callback):
    """Says ``graphs    steps are replayed as CUDA graphs from step 4 on``, or why they are not."""

    def __init__(self, graphs: GraphedPasses) -> None:
        self._graphs = graphs
        self._is_reported = self._is_dropped = self._is_in_pieces = False

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        graphs, in_pieces = self._graphs, self._graphs.in_pieces
        if graphs.problem is not None and in_pieces is not None and in_pieces.problem is None:
            if in_pieces.count and not self._is_in_pieces:
                loop.say(
                    f"graphs    {in_pieces.description} are replayed as CUDA graphs from "
                    f"step {loop.step + 1} on, but not the whole step: {graphs.problem}"
                )
                self._is_in_pieces = True
        elif graphs.problem is not None and not self._is_dropped:
            loop.say(f"graphs    steps are not replayed as CUDA graphs: {graphs.problem}")
            if in_pieces is not None:
                loop.say(f"graphs    nor are blocks by themselves: {in_pieces.problem}")
            self._is_dropped = True
        elif graphs.count and not self._is_reported:
            what = "steps, optimizer included," if graphs.updates else "steps"
            loop.say(f"graphs    {what} are replayed as CUDA graphs from step {loop.step + 1} on")
            self._is_reported = True

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        count = self._graphs.count
        if count:
            loop.say(f"graphs    {count} CUDA graph{'s' if count > 1 else ''} captured")
