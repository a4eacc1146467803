"""``rapidformer bench``: what it refuses at once, and one benchmark from the shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from rapidformer.benchmarking.job import Job, Result
from rapidformer.cli import bench, run_output
from rapidformer.cli.bench import run
from rapidformer.cli.main import main
from rapidformer.errors import ConfigurationError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "1"], "nothing to measure"),
        (["--task", "causal_lm", "--bench-steps", "0"], "--bench-steps must be at least 1, got 0"),
        (["--task", "causal_lm", "--nproc-per-node", "2", "--against", "hf"], "of one process"),
        (["--task", "causal_lm", "--nnodes", "2", "--master-port", "1"], "runs on one node"),
        (["--task", "causal_lm", "--against", "x"], "invalid choice: 'x'"),
        (["--task", "causal_lm", "--lerning-rate", "1"], "--lerning-rate"),
        (["--task", "causal_lm", "--data-path", "none.csv"], "none.csv: no such file or folder"),
    ],
)
def test_bad_flags_are_refused_at_once(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(words)


def test_help_names_its_own_flags(capsys: Any) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--against" in text
    assert "--bench-steps" in text


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, list[str]]]:
    """The runs that were started, each with its flags; none of them really runs."""
    started: list[tuple[Job, list[str]]] = []

    def start_run(words: list[str], args: Any, *, job: Job, **_: Any) -> None:
        started.append((job, words))
        Result(
            model="m", parameters=1, device="CPU", precision="fp32", global_batch=16,
            first_step=1.0, step_times=[1.0 + bool(job.peer)] * 30, rows=480, tokens=6000,
            slots=8000, peak_memory=8, matrix_rate=1.0,
        ).save(job.get_path(0))  # fmt: skip

    monkeypatch.setattr(bench, "start_run", start_run)
    monkeypatch.setattr(run_output, "find_task_problems", lambda *_: [])  # they have no data
    return started


def test_a_budget_of_tokens_is_tried_if_micro_batches_of_an_update_differ(
    jobs: list[tuple[Job, list[str]]],
) -> None:
    run = ["--task", "causal_lm", "--device", "cpu", "--micro-batch-size"]
    bench.run([*run, "16"])
    names = ["run", "mixed-precision", "compile", "tokens-per-micro-batch"]
    assert [job.name for job, _ in jobs] == names
    assert jobs[2][1][-2:] == ["--compile-backend", "inductor"], "on a CPU, it must be asked for"
    jobs.clear()
    bench.run([*run, "16", "--compile"])
    assert [job.name for job, _ in jobs] == names, "that has compiled nothing"
    jobs.clear()
    bench.run([*run, "4"])
    assert [words[words.index("4") + 1 :] for _, words in jobs[-2:]] == [
        ["--micro-batch-size", "8", "--global-batch-size", "16"],
        ["--tokens-per-micro-batch", "128"],
    ]


def test_both_sides_of_a_comparison_run_twice_in_turn(
    jobs: list[tuple[Job, list[str]]], capsys: Any
) -> None:
    run(["--task", "causal_lm", "--device", "cpu", "--against", "hf", "--no-tries"])
    assert [job.name for job, _ in jobs] == ["run", "hf", "run-2", "hf-2"]
    assert jobs[0][0].seconds > 0
    assert [(job.steps, job.seconds) for job, _ in jobs[1:]] == [(30, 0.0)] * 3
    assert "rapidformer is 2.00 x as fast (2.00 and 2.00 in turn)" in capsys.readouterr().out


def test_a_benchmark_prints_json(
    rapidformer: Callable[..., CompletedProcess[str]],
    small_model: Path,
    small_data: Path,
) -> None:
    done = rapidformer(
        "bench", "--task", "sequence_classification", "--pretrained-model-name-or-path",
        small_model, "--data-path", small_data, "--micro-batch-size", 4, "--epochs", 1,
        "--bench-steps", 2, "--bench-warmup", 1, "--no-tries", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["run"]
    assert result["model"] == "BertForSequenceClassification"
    assert len(result["step_times"]) == 2
    assert result["rows"] == 8
