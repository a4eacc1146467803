"""Everything that the page shows of one run, read from its folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import METRICS_FILE, list_arguments
from rapidformer.checkpoint.inventory import RunEntry, take_inventory
from rapidformer.checkpoint.publish import read_json
from rapidformer.errors import DataError
from rapidformer.hub import suggest_path
from rapidformer.report.metrics import Line, build_curves, list_evaluations, read_lines
from rapidformer.run_events import read_events

Event = dict[str, Any]
_DURING = ("start", "batch", "phases", "evaluation", "stall", "moved", "end")
"""Events of the run itself; others may be added days later."""
_EVALUATED = "evaluation_*.json"
"""Written by ``rapidformer evaluate``."""
_SHOWN_EVALUATIONS = 30
"""Rows of evaluations, and evaluations with their tables and samples."""
_OPEN_END = 2**31
"""The last step of a run over a stream of unknown length."""


def find_metrics(source: Path) -> Path:
    """The numbers of a run, by its folder or by the file itself."""
    if not source.exists():
        raise DataError(f"{source} does not exist.{suggest_path(source)}")
    metrics = source / METRICS_FILE if source.is_dir() else source
    if not metrics.is_file() or metrics.suffix != ".jsonl":
        raise DataError(f"{source} has no {METRICS_FILE}: give the folder of a run (--save).")
    return metrics


def read_run(metrics_file: Path, *, most: int) -> dict[str, Any]:
    """The page's facts about a run; ``most`` limits the points of a curve."""
    folder, lines = metrics_file.parent, read_lines(metrics_file)
    curves = build_curves(lines, most)
    rare = [line for line in lines if "lr" not in line]  # not of training
    all_events = list(read_events(folder))
    events = _drop_repeated(all_events)
    if not curves and not events:
        raise DataError(
            f"{metrics_file} has no numbers yet: wait until the run reaches a log interval."
        )
    found = take_inventory(folder).runs
    entry = next((run for run in found if run.path == folder), None)
    last = {event["event"]: event for event in events}
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        **_judge(events, entry, lines, metrics_file),
        "seconds": _add_up(all_events),
        "curves": curves,
        "evaluations": _pick(list_evaluations(rare), _SHOWN_EVALUATIONS),
        "details": _pick([e for e in events if e["event"] == "evaluation"], _SHOWN_EVALUATIONS),
        "settings": list(list_arguments(folder)),
        "best": entry and entry.best,
        "checkpoints": _list_checkpoints(entry),
        "start": last.get("start", {}),
        "batch": last.get("batch"),
        "phases": last.get("phases"),
        "events": [e for e in events if e["event"] not in ("evaluation", "batch", "phases")],
        "plan": _find_plan(rare),
        "evaluated": [read_json(f, or_nothing=True) for f in sorted(folder.glob(_EVALUATED))],
        "odd": [line for line in rare if _is_odd(line)][-100:],
    }


def _drop_repeated(events: Iterable[Event]) -> list[Event]:
    """Without what a resumed run has done again since."""
    kept: list[Event] = []
    for event in events:
        step = event.get("step")
        if event["event"] == "start" and isinstance(step, int):
            kept = [e for e in kept if e["event"] == "start" or e.get("step", 0) <= step]
        kept.append(event)
    return kept


def _judge(
    events: list[Event], entry: RunEntry | None, lines: list[Line], metrics_file: Path
) -> dict[str, Any]:
    """The state, how far the run is, and how long it still takes."""
    started = [e for e in events if e["event"] == "start"]
    after = events[events.index(started[-1]) :] if started else events
    ends = [event for event in after if event["event"] == "end"]
    moves = [event for event in after if event["event"] in ("stall", "moved")]
    total = started[-1].get("train_iters") if started else entry and entry.train_iters
    step = max((line["step"] for line in lines), default=entry and entry.step) or 0
    written = metrics_file.stat().st_mtime
    state, reason = entry.state if entry is not None else "unknown", ""
    if ends:
        state, reason = ends[-1].get("state", state), ends[-1].get("reason", "")
    elif state == "running" and moves and moves[-1]["event"] == "stall":
        state, reason = "stalled", moves[-1].get("text", "")
    elif started and state != "running":
        state = "killed"
    left = next((line["seconds_left"] for line in reversed(lines) if "seconds_left" in line), None)
    return {
        "state": state,
        "reason": reason,
        "step": step,
        "total": total if isinstance(total, int) and total < _OPEN_END else None,
        "seconds_left": left if state == "running" else None,
        "written": written,
    }


def _add_up(events: list[Event]) -> float | None:
    """The time that the run has run by its events, without the pauses between its starts."""
    starts = [number for number, event in enumerate(events) if event["event"] == "start"]
    total = 0.0
    for first, following in pairwise([*starts, len(events)]):
        session = [e["time"] for e in events[first:following] if e["event"] in _DURING]
        total += session[-1] - session[0]
    return total if starts else None


def _pick(items: list[Any], most: int) -> list[Any]:
    """All of them, or the first, the last and some between."""
    if len(items) <= most:
        return items
    return [items[number * (len(items) - 1) // (most - 1)] for number in range(most)]


def _list_checkpoints(entry: RunEntry | None) -> list[dict[str, Any]]:
    return [
        {
            "name": one.path.name, "step": one.step, "state": one.state, "problem": one.problem,
            "loss": one.loss, "bytes": one.bytes, "modified": one.modified,
        }
        for one in (entry.checkpoints if entry is not None else ())
    ]  # fmt: skip


def _find_plan(lines: list[Line]) -> dict[str, Line] | None:
    """What --plan predicted of the run's memory and time, and what it took."""
    line = next((line for line in reversed(lines) if "predicted_memory_gib" in line), None)
    return line and {
        kind: {n.removeprefix(f"{kind}_"): v for n, v in line.items() if n.startswith(f"{kind}_")}
        for kind in ("predicted", "actual")
    }


def _is_odd(line: Line) -> bool:
    """Whether it tells of a bad batch or of a save, which are not on the usual schedule."""
    return "save_stall_s" in line or any(isinstance(v, str | list) for v in line.values())
