"""How far an evaluation or prediction has come: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rapidformer.log import get_logger

_LINE_SECONDS = 10.0


@contextmanager
def show_progress(
    total: int, what: str, *, wanted: bool | None, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of further examples done."""
    is_terminal = sys.stderr.isatty()
    if not (is_terminal if wanted is None else wanted):
        yield (lambda count: None) if is_terminal else _log_lines(total, what, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn(what), BarColumn(), MofNCompleteColumn(), Elapsed(), Remaining(),
        TextColumn("left"),
    )  # fmt: skip
    # Not redirected: what is written to stdout meanwhile must go there, to a file perhaps.
    console = Console(stderr=True)
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total, completed=done)

        def advance(count: int) -> None:
            nonlocal done
            done = min(
                done + count, total
            )  # the last round may be padded to the same size on all ranks
            progress.update(task, completed=done)

        yield advance


def _log_lines(total: int, what: str, done: int) -> Callable[[int], None]:
    """A function that logs a line at most every ten seconds; short work logs none."""
    start = last = time.monotonic()
    first = done

    def advance(count: int) -> None:
        nonlocal last, done
        done = min(done + count, total)
        now = time.monotonic()
        if now - last >= _LINE_SECONDS and first < done < total:
            last, rate = now, (done - first) / (now - start)
            left = timedelta(seconds=round((total - done) / rate))
            get_logger().info(f"{what} | {done:,} of {total:,} | {rate:,.1f}/s | {left} left")

    return advance
