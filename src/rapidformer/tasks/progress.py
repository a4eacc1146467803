"""A progress bar over the examples of an evaluation, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(total: int, what: str, *, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of examples done; silent without a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda count: None
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
        task = progress.add_task(what, total=total)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done = min(
                done + count, total
            )  # the last round may be padded to the same size on all ranks
            progress.update(task, completed=done)

        yield advance
