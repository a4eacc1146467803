"""``rapidformer sweep``: trials in folders of their own, followed by their metrics.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer.cli import sweep as command
from rapidformer.cli.main import main

pytest.importorskip("optuna", reason="the extra rapidformer[search] is not installed")
# A run in miniature: it appends evaluations to its metrics.jsonl, and goes on where it was.
TRIAL = """
import json, os, signal, sys, time
from pathlib import Path
words = dict(word.partition("=")[::2] for word in sys.argv[1:] if "=" in word)
folder, rate = Path(sys.argv[sys.argv.index("--save") + 1]), float(words["--lr"])
assert "--resume auto" in " ".join(sys.argv) and os.environ["RAPIDFORMER_PARENT"]
folder.mkdir(exist_ok=True)
if rate == 0.5:
    print("error: this rate is too high."); sys.exit(1)
if rate == 0.25 and not (folder / "was_killed").exists():
    (folder / "was_killed").touch()
    os.kill(os.getppid(), signal.SIGINT); time.sleep(60)
with (folder / "metrics.jsonl").open("a") as file:
    for step in range(1, 4):
        file.write(json.dumps({"step": step, "eval_loss": rate + 1 / step, "eval_f1": 0.0}) + "\\n")
"""


@pytest.fixture
def sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any, small_model: Path, small_data: Path
) -> Any:
    """The command with trials in miniature; returns its status and what it wrote."""
    real = command.subprocess.Popen

    def start(words: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", TRIAL, *words[4:]], **options)

    def run(*words: str) -> tuple[int, str, str]:
        flags = [
            "--task", "sequence_classification", "--data-path", str(small_data),
            "--pretrained-model-name-or-path", str(small_model), "--device", "cpu",
        ]  # fmt: skip
        status = main(["sweep", *flags, *words])
        return (status, *capfd.readouterr())

    monkeypatch.setattr(command.subprocess, "Popen", start)
    monkeypatch.setattr(command, "_PAUSE", 0.02)
    monkeypatch.chdir(tmp_path)
    return run


def test_a_sweep_from_beginning_to_end(sweep: Any, tmp_path: Path) -> None:
    words = ["--sweep", "lr=0.1,0.2,0.5,0.3", "--output_dir", "found", "--seed", "5"]
    status, table, said = sweep(*words)
    assert status == 0, said
    assert said.count("eval_loss") == 3 and "this rate is too high. (failed)" in said
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    best = next(one for one in results["trials"] if one["number"] == results["best"])
    assert best["parameters"] == {"lr": 0.1} and best["value"] == pytest.approx(0.1 + 1 / 3)
    assert results["command"].endswith("--seed 5 --metric-for-best-model eval_loss --lr=0.1")
    assert "output" not in results["command"]
    assert f"again     {results['command']}" in table
    rows = [line.split()[:2] for line in table.strip().splitlines()[1:5]]
    assert [float(value) for _, value in rows[:3]] == [0.433333, 0.533333, 0.633333]
    assert sorted(path.name for path in (tmp_path / "found").glob("trial_*")) == [
        "trial_0000", "trial_0001", "trial_0002", "trial_0003",
    ]  # fmt: skip
    status, again, said = sweep(*words)
    assert status == 0 and again == table and "4 trials, 0 to run" in said
    status, _, said = sweep(*words, "--metric", "f1")
    assert status == 1 and "has another sweep (--metric: eval_loss, now eval_f1" in said


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_an_interrupted_trial_goes_on_under_its_number(sweep: Any, tmp_path: Path) -> None:
    words = ["--sweep", "lr=0.1,0.25", "--save", "found"]
    status, _, said = sweep(*words)
    assert status == 130 and "the same command goes on" in said
    before = json.loads((tmp_path / "found" / "results.json").read_text())["trials"]
    status, _, said = sweep(*words)
    assert status == 0, said
    after = json.loads((tmp_path / "found" / "results.json").read_text())["trials"]
    assert after[: len(before)] == before and [one["state"] for one in after] == ["complete"] * 2
    assert {one["parameters"]["lr"] for one in after} == {0.1, 0.25}
    killed = next(one for one in after if one["parameters"]["lr"] == 0.25)
    assert (tmp_path / "found" / killed["folder"] / "was_killed").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--sweep", "lr=0.1,0.2", "--metric", "eval_f11"],
            "have eval_loss, eval_f1. Did",
        ),
        (["--sweep", "lr=-1,0.2"], "--lr must not be negative"),
        (["--trials", "3"], "nothing to try: give --sweep"),
        (["--sweep", "lr=0.1,0.2", "--parallel", "0"], "--parallel must be at least 1"),
        (["--sweep", "lr=0.1,0.2", "--load", "x"], "--load is not for a sweep"),
    ],
)
def test_mistakes_are_one_line(sweep: Any, words: list[str], said: str) -> None:
    status, _, written = sweep(*words)
    assert status == 1 and said in written and "Traceback" not in written
