"""Progress output: a bar on a terminal, elsewhere a line every --log-interval documents."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from rapidformer.data.preprocess.parts import PartReport
from rapidformer.log import get_logger

if TYPE_CHECKING:
    import rich.progress


class Progress:
    """Counts what is done. ``total`` and positions are bytes on disk, before decompression."""

    def __init__(self, total: int, done: int, *, log_interval: int, show_bar: bool | None) -> None:
        self._total, self._begun_at, self._position = total, done, done
        self._read = done
        self._sizes: dict[int, int] = {}
        self._log_interval = log_interval
        self._next_line = log_interval
        self._start = time.monotonic()
        self._documents = self._tokens = self._text_bytes = 0
        wants_bar = sys.stderr.isatty() if show_bar is None else show_bar
        self._bar = _start_bar(total, done) if wants_bar else None

    def announce(self, number: int, end: int) -> None:
        """A part was cut: the input has been read up to here."""
        self._sizes[number] = end - self._read
        self._read = end

    def skip(self, number: int) -> None:
        """A part already exists: it counts neither as done nor as remaining."""
        size = self._sizes.pop(number, 0)
        self._position += size
        self._begun_at += size

    def add(self, report: PartReport) -> None:
        """One more part is done."""
        self._position += self._sizes.pop(report.number, 0)
        self._documents += report.counts[0].documents
        self._tokens += sum(counts.tokens for counts in report.counts)
        self._text_bytes += report.text_bytes
        if self._bar is not None:
            [task] = self._bar.task_ids
            self._bar.update(task, completed=self._position, note=self._format())
        elif self._documents >= self._next_line:
            self._next_line = (self._documents // self._log_interval + 1) * self._log_interval
            get_logger().info("%s | left %s", self._format(), self._format_time_left())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _format(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self._documents:,} documents | {shorten(self._tokens)} tokens | "
            f"{self._text_bytes / seconds / 1e6:.1f} MB/s"
        )

    def _format_time_left(self) -> str:
        done = max(self._position - self._begun_at, 1)
        left = (time.monotonic() - self._start) / done * max(self._total - self._position, 0)
        return str(timedelta(seconds=round(left)))


def _start_bar(total: int, done: int) -> rich.progress.Progress:
    """The terminal's last line; log messages scroll above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("preprocess"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[note]}"), TextColumn("left"), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    bar.add_task("", total=max(total, 1), completed=done, note="")
    bar.start()
    return bar


def shorten(number: float) -> str:
    """1,234,567 as 1.2M."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"
