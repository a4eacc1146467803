"""``rapidformer verify`` with runs that are forked from the test's own process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer.cli.main import main as run_command
from rapidformer.launch import local
from rapidformer.launch.environment import LaunchPlan
from tests.processes import run_in_processes


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path) -> Any:
    """The command, whose runs are forked; returns its exit status, stdout and stderr."""
    kinds: list[str] = []

    def fork(plan: LaunchPlan, argv: list[str], settings: Any, **_: Any) -> None:
        kinds.append(json.loads(os.environ["RAPIDFORMER_VERIFICATION"])["kind"])
        run_in_processes(_run_here, plan.processes, argv)

    def run(*words: object) -> tuple[int, str, str]:
        kinds.clear()
        status = run_command(["verify", *map(str, words)])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    monkeypatch.setattr(local, "launch", fork)
    monkeypatch.chdir(tmp_path)
    run.kinds = kinds
    return run


def _run_here(argv: list[str]) -> None:
    from rapidformer.cli.verify import run

    sys.path = list(sys.path)
    run(argv[1:])
