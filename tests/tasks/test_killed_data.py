"""A command that is killed and goes on elsewhere: the rows are those of the run that lived."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from rapidformer.cli.main import main
from tests.processes import ROOT, wait_until
from tests.tasks.conftest import write_jsonl

_STEPS = 28
_MIXTURE = """
- {path: a.jsonl, weight: 2}
- {path: b.jsonl, weight: 1, columns: {text: tweet, label: mood}}
"""


def read_losses(folder: Path) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = [line for line in lines if "loss" in line]
    return {line["step"]: {k: v for k, v in line.items() if k.endswith("loss")} for line in kept}


@pytest.mark.parametrize(
    "flags",
    [["--data-stopping", "all"], ["--streaming", "--shuffle-buffer", "7"]],
    ids=["mixture", "streams"],
)
def test_a_killed_command_goes_on_with_other_ranks_and_workers(
    flags: list[str], bert_folder: Path, tmp_path: Path, python: Path
) -> None:
    model = shutil.copytree(bert_folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config))
    for name, count, columns in (("a", 40, ("text", "label")), ("b", 21, ("tweet", "mood"))):
        texts = [("the cat " * (n % 4 + 1) + "runs", "xy"[n % 3 == 0]) for n in range(count)]
        rows = [dict(zip(columns, text, strict=True)) for text in texts]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "mix.yaml").write_text(_MIXTURE)
    words = [
        "--task", "sequence_classification", "--data-path", str(tmp_path / "mix.yaml"), *flags,
        "--pretrained-model-name-or-path", str(model), "--global-batch-size", "4",
        "--train-iters", str(_STEPS), "--save-interval", "4", "--log-interval", "1", "--lr", "0.01",
        "--device", "cpu", "--no-progress", "--log-level", "error", "--seed", "3",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main([*words, "--micro-batch-size", "4", "--save", str(whole)])

    def start(*more: str) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "rapidformer.cli.main", *words, "--save", str(killed), *more]
        return subprocess.Popen(command, env=variables)

    process = start("--micro-batch-size", "2")
    wait_until(lambda: (killed / "iter_0000004").is_dir() or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(read_losses(killed)) < _STEPS
    more = ("--micro-batch-size", "1", "--nproc-per-node", "2", "--num-workers", "2")
    assert start(*more, "--load", str(killed)).wait() == 0
    expected, found = read_losses(whole), read_losses(killed)
    assert list(found) == list(range(1, _STEPS + 1))
    assert any(len(line) == 3 for line in found.values()), "the losses of both sets"
    for step, line in expected.items():
        assert found[step] == pytest.approx(line, abs=2e-5), step
