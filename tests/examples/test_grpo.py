"""The example of GRPO learns its task, from chance to nearly always right."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo" / "run.sh"


def test_a_model_that_knows_nothing_learns_to_copy_a_digit(python: Path, tmp_path: Path) -> None:
    path = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(EXAMPLE), "--save", "run"], env={**os.environ, "PATH": path}, check=False,
        capture_output=True, text=True, cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["reward"] for line in lines if "reward" in line) < 0.2
    assert lines[-1]["eval_reward"] > 0.95
    assert "answer    'copy " in done.stderr
