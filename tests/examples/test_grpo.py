"""The example of GRPO learns its task, from chance to nearly always right."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo"
_PRINT = "#!/bin/bash\nprintf '%s\\n' \"$@\"\n"


def read_command(folder: Path, *more: str) -> list[str]:
    """The words after ``rapidformer`` in the example's script."""
    for name, script in (("rapidformer", _PRINT), ("python", "#!/bin/bash\n")):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLE / "run.sh"), *more], check=True, capture_output=True, text=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_model_that_knows_nothing_learns_to_copy_a_digit(command: Any, tmp_path: Path) -> None:
    words = read_command(tmp_path, "--save", "run")
    runpy.run_path(str(EXAMPLE / "build_toy.py"))["build_toy"](tmp_path / "toy")
    done = command(*words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["reward"] for line in lines if "reward" in line) < 0.2
    assert [line["eval_reward"] for line in lines if "eval_reward" in line][-1] > 0.95
    assert "answer    'copy " in done.stderr
