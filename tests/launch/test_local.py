"""Processes started by the command on one node: failures, restarts, logs and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.commands import Command
from tests.processes import is_alive, wait_until

Start = Callable[..., Command]

RANK = "import os; rank = os.environ.get('RANK', '0')\n"
# Longer than any test waits: whoever ends before was ended.
WAIT = "import time; time.sleep(600)\n"
TWO = ("--device", "cpu", "--nproc-per-node", "2")


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    def begin(code: str, *flags: object, is_launch: bool = False) -> tuple[int, str, str]:
        script = tmp_path / "script.py"
        script.write_text(RANK + code)
        words = ["launch", *flags, script] if is_launch else ["--user-script", script, *flags]
        command = start(*words)
        status = command.wait()
        # The line printed before torch is imported; `launch` does not print it.
        errors = re.sub(r"^loading   torch, .*\n", "", command.err)
        return status, command.out, errors

    return begin


Run = Callable[..., tuple[int, str, str]]


def test_two_processes_run_the_script_with_its_flags(run: Run, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
text = " ".join([*(os.environ.get(n, "-") for n in names), *sys.argv[3:]])
Path({str(tmp_path)!r}, "rank" + rank).write_text(text)
"""
    flags = ("--device", "cpu", "--nproc_per_node", "2", "--own_flag", "x")
    status, _, err = run(code, *flags)
    assert status == 0, err
    assert (tmp_path / "rank0").read_text() == f"0 0 2 {' '.join(flags)}"
    assert (tmp_path / "rank1").read_text() == f"1 1 2 {' '.join(flags)}"


@pytest.mark.parametrize(
    "flags",
    [
        ("--own-flag", "1", "--nproc-per-node", "1"),
        ("--own-flag", "--nproc-per-node=1"),
    ],
    ids=["same value twice", "switch"],
)
def test_flags_of_the_scripts_own_do_not_disturb_the_launch(
    flags: tuple[str, ...], run: Run
) -> None:
    code = "import sys; print(' '.join(sys.argv[5:]))"
    status, out, err = run(code, "--device", "cpu", *flags)
    assert status == 0, err
    assert out.strip() == " ".join(flags)


def test_user_script_may_be_spelt_with_an_underscore(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    command = start(f"--user_script={script}", "--own-flag", "3", "--device", "cpu")
    assert command.wait() == 0, command.err
    assert command.out == "here\n"


def test_launch_leaves_the_scripts_command_line_alone(run: Run, start: Start) -> None:
    code = "import sys; print(rank, sys.argv[1:])"
    status, out, err = run(code, *TWO, is_launch=True)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["0 []", "1 []"]


def test_message_of_the_process_that_failed_is_shown_once(run: Run) -> None:
    code = f"""
from rapidformer.errors import RapidformerError
if rank == "1":
    raise RapidformerError("the second one is unwell")
{WAIT}"""
    status, out, err = run(code, *TWO)
    assert status == 1
    assert err == "error: rank 1: the second one is unwell\n", (
        "nothing of the launcher's own around it"
    )
    assert out == ""


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("raise SystemExit(7 if rank == '1' else 0)", 7, "rank 1 ended with status 7"),
        (
            "if rank == '1': raise ValueError('a defect')\n" + WAIT,
            1,
            "ValueError: a defect",
        ),
        (
            "import threading, time\nif rank == '1':\n"
            "    threading.Thread(target=time.sleep, args=(9999,)).start()\n"
            "    raise ValueError('a defect')\n" + WAIT,
            1,
            "ValueError: a defect",
        ),
        (
            "if rank == '1': os.kill(os.getpid(), 9)\n" + WAIT,
            137,
            "rank 1 was ended by signal SIGKILL",
        ),
    ],
    ids=["exit status", "traceback", "a thread that still runs", "killed"],
)
def test_exit_status_is_that_of_the_process_that_failed(
    code: str, status: int, text: str, run: Run
) -> None:
    found, _, err = run(code, *TWO)
    assert found == status
    assert err.count(text) == 1


def test_traceback_begins_in_the_script(run: Run) -> None:
    _, _, err = run("def work():\n    raise ValueError('a defect')\nwork()", *TWO)
    lines = err.splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].endswith('script.py", line 4, in <module>'), err
    assert "in work" in lines[4]


def test_run_that_breaks_is_started_again_and_every_output_is_kept(
    run: Run, tmp_path: Path
) -> None:
    code = """
import sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("out", rank, attempt, flush=True)
os.write(2, f"err {rank} {attempt}\\n".encode())
if rank == "1" and attempt == "0":
    raise ValueError("a passing trouble")
"""
    status, out, err = run(code, *TWO, "--max-restarts", "2", "--log-dir", tmp_path / "logs")
    assert status == 0, err
    assert "rank 1: ValueError: a passing trouble\nrestart 1 of 2\n" in err
    assert "restart 2" not in err
    assert {"out 0 1", "out 1 1"} <= set(out.splitlines()), f"not on the terminal:\n{out}\n{err}"
    for rank in "01":
        lines = (tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        kept = [line for line in lines if not line.startswith("===")]
        assert kept[-2:] == [f"out {rank} 1", f"err {rank} 1"], "both streams, in their order"
        assert [line.rpartition(", ")[2] for line in lines if line.startswith("===")] == [
            "attempt 0 ===",
            "attempt 1 ===",
        ]


def test_restarts_end_after_as_many_as_were_given_and_logs_lie_in_the_save_folder(
    run: Run, tmp_path: Path
) -> None:
    code = "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT']); raise SystemExit(5)"
    save = tmp_path / "save"
    status, out, err = run(code, "--device", "cpu", "--max-restarts", "1", "--save", save)
    assert status == 5
    assert out == "attempt 0\nattempt 1\n"
    log = save / "logs" / "rank_0.log"
    assert err.endswith(f"error: rank 0 ended with status 5; its output is in {log}.\n")
    assert log.read_text().count("attempt") == 4


def test_mistake_of_the_users_is_not_tried_again(run: Run) -> None:
    code = (
        "from rapidformer.errors import DataError; print('once'); raise DataError('no such file')"
    )
    status, out, err = run(code, *TWO, "--max-restarts", "3")
    assert status == 1
    assert err in ("error: no such file\n", "error: rank 1: no such file\n"), "whoever was first"
    assert out.count("once") <= 2, "by each process"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_signal_to_the_launcher_ends_all_within_seconds(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children that stop their ears and grandchildren included."""
    monkeypatch.setattr("rapidformer.launch.agent._STOP_SECONDS", 1)
    script = tmp_path / "script.py"
    script.write_text(
        RANK
        + f"""
import signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path({str(tmp_path)!r}, 'pid' + rank).write_text(f"{{os.getpid()}} {{child.pid}} .")
{WAIT}"""
    )
    command = start("launch", *TWO, script)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_until(
        lambda: all(f.exists() and f.read_text().endswith(".") for f in files),
        describe=command.describe,
    )
    workers, children = zip(*(map(int, f.read_text().split()[:2]) for f in files), strict=True)
    number = getattr(signal, name)
    command.send(number)
    if name == "SIGKILL":
        # Nobody is left to clear up; the kernel ends the workers.
        command.wait()
        wait_until(lambda: not any(map(is_alive, workers)))
        for child in children:
            os.kill(child, signal.SIGKILL)
        return
    assert command.wait() == 128 + number
    assert f"stopped by signal {name}" in command.err
    if name in ("SIGINT", "SIGTERM"):
        assert "--load RUN resumes from it." in command.err
    assert "Traceback" not in command.err
    wait_until(lambda: not any(map(is_alive, workers + children)))


def test_error_in_the_flags_is_reported_before_any_process_is_started(start: Start) -> None:
    command = start("--nproc-per-node", "2", "--task", "masked_lm", "--epochs", "-1")
    assert command.wait() == 1
    assert command.err.startswith(
        "error: 3 problems:\n  - --epochs must not be negative, got -1.\n"
    )
    assert "no model: give" in command.err and "no data: give" in command.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch", "--nproc-per-node", "2"], "no script: use rapidformer launch"),
        (["launch", "none.py"], "none.py is not a file"),
        (["launch", "--epochs", "3", "none.py"], "--epochs is not a flag of the launcher"),
        (["launch", "--max-restarts", "-1", __file__], "--max-restarts must not be negative"),
        (["launch", "--hostfile", "none", __file__], "--hostfile none cannot be read"),
    ],
)
def test_launch_flags_that_cannot_be(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rapidformer.cli.main import main

    monkeypatch.delenv("RAPIDFORMER_FLAGS", raising=False)
    assert main(words) == 1
    assert capsys.readouterr().err.startswith(f"error: {text}")


def test_launch_flags_reach_the_scripts_engine_and_may_come_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rapidformer.cli.launch import read_launch_settings
    from rapidformer.config import parse_arguments

    monkeypatch.setenv("RAPIDFORMER_FLAGS", "")
    script = tmp_path / "script.py"
    script.write_text("")
    config = tmp_path / "a b.yaml"
    config.write_text("mixed_precision: bf16\nnproc_per_node: 3\n")
    own = ["--config", str(config), "--distributed-timeout-minutes=2"]
    behind = ["--num_gpus", "5", "--device", "cuda:1", "--save", "there", "--lr", "x"]
    found = read_launch_settings([*own, str(script), *behind])
    assert (found.nproc_per_node, found.device, found.save) == (5, "auto", "there")
    in_script = parse_arguments(["--lr", "0.1", "--distributed-timeout-minutes", "3"])
    assert in_script.mixed_precision == "bf16"
    assert in_script.distributed_timeout_minutes == 3, "the script's own word wins"


def test_help_of_launch_needs_no_torch() -> None:
    code = """
import sys
from rapidformer.cli.main import main
assert main(["launch", "--help"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-restarts" in done.stdout
    assert "SCRIPT" in done.stdout
