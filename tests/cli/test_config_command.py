"""``rapidformer config``: questions, answers and the file."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rapidformer.config import parse_arguments

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ask(command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("rapidformer.cli.config.count_gpus", lambda: 0)

    def run(*words: object, answers: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(answers))
        return command("config", *words)

    return run


def test_defaults_need_no_terminal(ask: Run, tmp_path: Path) -> None:
    done = ask("--yes")
    assert done.returncode == 0, done.stderr
    assert "written: rapidformer.yaml" in done.stdout
    args = parse_arguments(["--config", str(tmp_path / "rapidformer.yaml")])
    assert (args.device, args.nproc_per_node, args.nnodes) == ("cpu", 1, None)
    assert args.mixed_precision is None


def test_questions_of_the_seed(ask: Run, tmp_path: Path) -> None:
    """Several GPUs on one machine, no sharding, no mixed precision: as that document answers."""
    done = ask(answers="cuda\n1\n2\nno\nno\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("]: ") == 5
    text = (tmp_path / "rapidformer.yaml").read_text()
    assert [line.split("#")[0].strip() for line in text.splitlines()[1:]] == [
        "device: cuda",
        "nproc_per_node: 2",
    ]


def test_several_machines_meet_at_the_first(ask: Run, tmp_path: Path) -> None:
    done = ask("--output", "two.yaml", answers="cpu\n2\nvariables\nnode-a\n6010\n4\n3\nbf16\n")
    assert done.returncode == 0, done.stderr
    args = parse_arguments(["--config", str(tmp_path / "two.yaml")])
    assert (args.nnodes, args.master_addr, args.master_port) == (2, "node-a", 6010)
    assert (args.nproc_per_node, args.zero_stage, args.mixed_precision) == (4, 3, "bf16")
    assert "NODE_RANK" in (tmp_path / "two.yaml").read_text()


@pytest.mark.parametrize(
    ("start", "key"), [("hostfile", "hostfile: my_hosts"), ("slurm", "srun --ntasks-per-node=1")]
)
def test_other_ways_to_start_several_machines(
    start: str, key: str, ask: Run, tmp_path: Path
) -> None:
    flags = ["--nnodes", "2", "--start", start, "--hostfile", "my_hosts"]
    assert ask("--yes", *flags).returncode == 0
    text = (tmp_path / "rapidformer.yaml").read_text()
    assert key in text
    assert "master_addr" not in text


def test_wrong_answer_is_asked_for_again(ask: Run, tmp_path: Path) -> None:
    done = ask(answers="tpu\ncpu\n0\nmany\n1\n\n4\nno\nfp8\nfp16\n")
    assert done.returncode == 0, done.stderr
    for text in (
        "must be one of cpu, cuda, not 'tpu'.",
        "must be a whole number of at least 1, not '0'.",
        "must be a whole number of at least 1, not 'many'.",
        "must be one of no, 1, 2, 3, not '4'.",
        "must be one of no, fp16, bf16, not 'fp8'.",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "tpu"], "--device: must be one of cpu, cuda, not 'tpu'."),
        (
            ["--yes", "--nproc-per-node", "0"],
            "--nproc-per-node: must be a whole number of at least 1",
        ),
        (["--yes", "--nnodes", "2", "--master-port", "70000"], "at most 65535, not '70000'"),
        (["--yes", "--nope"], "unrecognized arguments: --nope"),
        (["--yes", "--output", "no/such/file"], "there is no folder no/such"),
        ([], "the input ended before all questions were answered"),
    ],
)
def test_bad_answers_are_reported_and_nothing_is_written(
    words: list[str], text: str, ask: Run, tmp_path: Path
) -> None:
    done = ask(*words)
    assert done.returncode == 1
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "rapidformer.yaml").exists()


def test_older_file_is_kept_unless_said(ask: Run, tmp_path: Path) -> None:
    (tmp_path / "rapidformer.yaml").write_text("seed: 1\n")
    done = ask("--yes")
    assert done.returncode == 1
    assert (
        "rapidformer.yaml already exists: choose another --output, or add --overwrite"
        in done.stderr
    )
    assert ask("--yes", "--overwrite").returncode == 0
    assert "seed" not in (tmp_path / "rapidformer.yaml").read_text()


def test_help_lists_the_answers_flags(ask: Run) -> None:
    done = ask("--help")
    assert done.returncode == 0
    assert "--mixed-precision ANSWER" in done.stdout


@pytest.mark.parametrize(("machine", "device"), [("2", "cuda"), ("1", "cpu")])
def test_the_six_answers_of_accelerate(ask: Run, tmp_path: Path, machine: str, device: str) -> None:
    done = ask(answers=f"0\n{machine}\n1\nno\n2\nno\n")
    assert "TPU" not in done.stdout, "nothing is offered that would be refused"
    assert done.returncode == 0, done.stderr
    args = parse_arguments(["--config", str(tmp_path / "rapidformer.yaml")])
    assert (args.device, args.nproc_per_node, args.mixed_precision) == (device, 2, None)
    assert args.zero_stage == 0


def test_accelerates_questions_again_after_a_wrong_answer(ask: Run, tmp_path: Path) -> None:
    done = ask(answers="0\n3\n2\n2\nyes\n8\nyes\n")
    assert "0, 1 or 2" in done.stdout
    args = parse_arguments(["--config", str(tmp_path / "rapidformer.yaml")])
    assert (args.nnodes, args.nproc_per_node, args.zero_stage) == (2, 4, 2)
    assert args.mixed_precision == "fp16"
