"""What a run says: a bar on a terminal, lines elsewhere, and a summary of what it made."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer.data.preprocess.inputs import Source
from rapidformer.data.preprocess.parts import FIRST_SHOWN, KeyCounts, PartReport, ProblemLog
from rapidformer.errors import count
from rapidformer.log import get_logger

if TYPE_CHECKING:
    import rich.progress


class Progress:
    """Counts what is done. ``total`` and positions are bytes on disk, before decompression."""

    def __init__(self, total: int, done: int, log_interval: int) -> None:
        self._total, self._begun_at, self._position = total, done, done
        self._read = done
        self._sizes: dict[int, int] = {}
        self._log_interval = log_interval
        self._next_line = log_interval
        self._start = time.monotonic()
        self._documents = self._tokens = self._text_bytes = 0
        self._bar = _start_bar(total, done) if sys.stderr.isatty() else None

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
            done = max(self._position - self._begun_at, 1)
            left = (time.monotonic() - self._start) / done * max(self._total - self._position, 0)
            get_logger().info("%s | left %s", self._format(), timedelta(seconds=round(left)))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _format(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self._documents:,} documents | {shorten(self._tokens)} tokens | "
            f"{self._text_bytes / seconds / 1e6:.1f} MB/s"
        )


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


# --- the summary ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    outputs: dict[str, Path]  # key -> prefix of its files
    counts: dict[str, KeyCounts]
    problems: ProblemLog
    sources: list[Source]
    dtype: str
    text_bytes: int
    made_bytes: int  # of the text, what this run itself did
    seconds: float
    workers: int
    parts: int
    reused_parts: int


def format_summary(summary: Summary) -> str:
    lines: list[str] = []
    for key, prefix in summary.outputs.items():
        counts = summary.counts[key]
        files = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx")]
        sizes = [file.stat().st_size for file in files]
        lines += [
            f"{prefix}",
            f"  documents  {counts.documents:,}",
            f"  sequences  {counts.sequences:,}",
            f"  tokens     {counts.tokens:,} ({summary.dtype})",
            f"  bytes      {sum(sizes):,} ("
            + ", ".join(f"{f.name} {size:,}" for f, size in zip(files, sizes, strict=True))
            + ")",
        ]
        if counts.empty:
            lines.append(f"  empty      {counts.empty:,} documents without any token, left out")
    lines += [_format_time(summary), *format_problems(summary.problems, summary.sources)]
    first = next(iter(summary.outputs.values()))
    lines.append(f"next: rapidformer data info {first}")
    return "\n".join(lines) + "\n"


def _format_time(summary: Summary) -> str:
    workers, files = count(summary.workers, "worker"), count(len(summary.sources), "file")
    rate = f"{summary.made_bytes / max(summary.seconds, 1e-9) / 1e6:.1f} MB/s, "
    text = (
        f"{files}, {summary.text_bytes / 1e6:,.1f} MB of input in {summary.seconds:.1f} s "
        f"({rate if summary.made_bytes else ''}{workers})"
    )
    if summary.reused_parts:
        text += f"; {summary.reused_parts} of {summary.parts} parts were there already"
    return text


def format_problems(problems: ProblemLog, sources: list[Source]) -> list[str]:
    """How many lines were skipped, why, and where the first of each kind are."""
    if not problems.count:
        return ["no line was skipped"]
    lines = [f"skipped {count(problems.count, 'line')}:"]
    for reason, problem in sorted(problems.items(), key=lambda item: -item[1].count):
        by_file: dict[int, list[str]] = {}
        for source, line, _ in problem.first:
            by_file.setdefault(source, []).append(str(line))
        places = "; ".join(
            f"{sources[source].path} {name_place(sources[source])} {', '.join(numbers)}"
            for source, numbers in by_file.items()
        )
        more = ", ..." if problem.count > FIRST_SHOWN else ""
        lines.append(f"  {reason}: {problem.count:,} ({places}{more})")
        detail = problem.first[0][2]
        if detail:
            lines.append(f"    the first: {detail}")
    return lines


def name_place(source: Source) -> str:
    """What a document's number counts: lines of a text, rows of a table, items of a list."""
    return {"parquet": "row", "json-array": "item"}.get(source.kind, "line")
