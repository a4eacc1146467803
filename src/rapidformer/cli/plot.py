"""``rapidformer plot RUN ...``: draw the loss curves of one run, or of several in one picture."""

from __future__ import annotations

import sys
from pathlib import Path

from rapidformer.cli.own_flags import CommandParser
from rapidformer.report.run import find_metrics


def run(argv: list[str]) -> None:
    """Draw each ``RUN/metrics.jsonl``; of one run, to ``RUN/curve.png``."""
    options = build_parser().parse_args(argv)
    files = [find_metrics(Path(text).expanduser()) for text in options.runs]
    from rapidformer.training.curve import plot_runs

    default = files[0].with_name("curve.png") if len(files) == 1 else Path("curves.png")
    picture = plot_runs(files, Path(options.output).expanduser() if options.output else default)
    sys.stdout.write(f"{picture}\n")


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer plot", description="Draw the loss curves of one run or of several."
    )
    parser.add("runs", "RUN", "the folder of a run", nargs="+")
    parser.add(
        "--output", "FILE", "the image, .png, .svg or .pdf (default: curve.png in the folder of a "
        "single run, curves.png here for several)",
    )  # fmt: skip
    return parser
