"""``rapidformer plot RUN``: draw the run's loss curve."""

from __future__ import annotations

import sys
from pathlib import Path

from rapidformer.errors import ConfigurationError, DataError


def run(argv: list[str]) -> None:
    """Draw ``RUN/metrics.jsonl`` to ``--output`` (default: ``RUN/curve.png``)."""
    words = list(argv)
    output = None
    if "--output" in words:
        at = words.index("--output")
        if at + 1 == len(words):
            raise ConfigurationError("--output needs the name of an image, such as curve.png.")
        output = words.pop(at + 1)
        words.pop(at)
    if len(words) != 1:
        raise ConfigurationError("usage: rapidformer plot RUN [--output curve.png]")
    source = Path(words[0])
    metrics = source / "metrics.jsonl" if source.is_dir() else source
    if not metrics.is_file():
        raise DataError(f"{source} has no metrics.jsonl: give the folder of a run (--save).")
    from rapidformer.training.curve import plot_run

    picture = plot_run(metrics, Path(output) if output else metrics.with_name("curve.png"))
    sys.stdout.write(f"{picture}\n")
