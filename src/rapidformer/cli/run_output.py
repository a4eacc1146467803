"""Runs that another command starts in new processes, and where their output goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rapidformer.config import Settings
from rapidformer.launch.environment import LaunchPlan


def start_run(words: list[str], args: Settings, *, processes: int, variable: str, job: str) -> None:
    """Run a command of ours in new processes on this machine, which find ``job`` in a variable."""
    from rapidformer.launch.local import launch

    plan = LaunchPlan(
        processes=processes, nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )
    os.environ[variable] = job
    try:
        launch(plan, words, args)
    finally:
        del os.environ[variable]


def write_output_to(path: Path) -> None:
    """Send the run's output to a file, which is of interest only if the run fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
