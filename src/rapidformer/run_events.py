"""``events.jsonl``: what happened in a run, beside its numbers; read by the run's page.

Each line is an object with its ``event`` and its ``time``. Lines are only ever added: by rank 0,
by the launcher (which outlives its ranks) and by commands that examine the run later. A line that
cannot be written is left out: a run never fails or waits for its record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rapidformer.strict_json import format_json, parse_object

EVENTS_FILE = "events.jsonl"
_LONGEST = 2_000_000
"""Bytes of a line: a table of thousands of classes is not worth more."""


def append_event(folder: Path, event: str, /, **facts: Any) -> None:
    """Add a line, in one write."""
    line = format_json({"event": event, "time": round(time.time(), 3), **facts}) + "\n"
    data = line.encode("utf-8", errors="replace")
    with suppress(OSError):
        path = folder / EVENTS_FILE
        if len(data) <= _LONGEST and (path.is_file() or not path.exists()):
            with path.open("ab", buffering=0) as file:
                file.write(data)


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; one that a crash has cut off is skipped."""
    path = folder / EVENTS_FILE
    with suppress(OSError):
        for text in path.read_bytes().split(b"\n") if path.is_file() else ():
            line = parse_object(text)
            if line is not None and isinstance(line.get("event"), str):
                yield line


def find_run(path: Path) -> Path | None:
    """The run that a file, checkpoint or model belongs to."""
    folders = (path, path.parent)
    return next((folder for folder in folders if (folder / EVENTS_FILE).is_file()), None)
