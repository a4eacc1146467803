"""Write the page: one file that opens from the disk, with all that it needs inside."""

from __future__ import annotations

import functools
import html
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import METRICS_FILE
from rapidformer.checkpoint.publish import read_json, replace_text
from rapidformer.errors import DataError
from rapidformer.report import PAGE_FILE
from rapidformer.report.run import find_metrics, read_run
from rapidformer.strict_json import drop_not_finite

RESULTS_FILE = "results.json"
"""The outcome of a sweep, in its folder."""
_MOST_POINTS = 2000
"""Of a curve; several runs share four times as many."""
_SCRIPTS = ("uPlot.iife.min.js", "elements.js", "charts.js", "sections.js", "page.js")
_MARK = re.compile(r"\{\{(\w+)\}\}")
_GENERATOR = b'<meta name="generator" content="rapidformer">'
# In a script element, a browser looks for these before it reads any JSON.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write_page(sources: Sequence[Path], output: Path) -> Path:
    """Write the page of these runs; a file that is no such page is not replaced."""
    if output.exists():
        with output.open("rb") as file:
            if _GENERATOR not in file.read(1000):
                problem = "is not a page of ours: move it, or choose another --output."
                raise DataError(f"{output} {problem}")
    replace_text(output, render_page(build_content(sources)))
    return output


def build_content(sources: Sequence[Path]) -> dict[str, Any]:
    """What the page shows of runs, or of a sweep by its folder."""
    sweep = _read_sweep(sources[0]) if len(sources) == 1 else None
    if sweep is not None:
        folders = [sources[0] / trial["folder"] for trial in sweep["trials"]]
        for folder, trial in zip(folders, sweep["trials"], strict=True):
            trial["has_page"] = (folder / PAGE_FILE).is_file()
        sources = [folder for folder in folders if (folder / METRICS_FILE).is_file()]
    most = max(100, min(_MOST_POINTS, 4 * _MOST_POINTS // max(1, len(sources))))
    runs = []
    for source in sources:
        try:
            runs.append(read_run(find_metrics(source), most=most))
        except DataError:
            if sweep is None:  # a trial may have failed before its first step
                raise
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = run["folder"]
    return {"made": time.time(), "runs": runs, "sweep": sweep}


def _read_sweep(folder: Path) -> dict[str, Any] | None:
    results = read_json(folder / RESULTS_FILE, or_nothing=True) if folder.is_dir() else {}
    is_sweep = isinstance(results.get("trials"), list) and "metric" in results
    return {"name": folder.resolve().name, **results} if is_sweep else None


def render_page(content: dict[str, Any], *, is_live: bool = False) -> str:
    """The whole document."""
    sweep, runs = content["sweep"], content["runs"]
    title = sweep["name"] if sweep else ", ".join(run["name"] for run in runs)
    parts = {
        "title": html.escape(_to_valid(title)),
        "live": "yes" if is_live else "",
        "styles": _read("uPlot.min.css") + _read("page.css"),
        "licence": _read("uPlot.LICENSE"),
        "scripts": "\n".join(map(_read, _SCRIPTS)),
        "content": to_script(content),
    }
    # In one pass: a user's text may look like a mark.
    return _MARK.sub(lambda mark: parts[mark[1]], _read("page.html"))


def to_script(content: Any) -> str:
    """JSON that stays data inside a script element, whatever texts it holds."""
    text = json.dumps(
        drop_not_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return _to_valid(text.translate(_ESCAPES))


def _to_valid(text: str) -> str:
    """A name on the disk or a broken character may be no valid text."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


@functools.cache
def _read(name: str) -> str:
    return (files("rapidformer.report") / "assets" / name).read_text(encoding="utf-8")
