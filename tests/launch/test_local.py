"""Runs of two processes started by the command: failures and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = "import os; rank = os.environ.get('RANK', '0')\n"
WAIT = "import time; time.sleep(120)\n"


def start(script: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    command = [sys.executable, "-m", "rapidformer.cli.main", "--user-script", str(script)]
    return subprocess.Popen(
        [*command, "--device", "cpu", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(tmp_path: Path, code: str, *flags: str) -> tuple[int, str, str]:
    script = tmp_path / "script.py"
    script.write_text(RANK + code)
    process = start(script, *flags)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_two_processes_run_the_script_with_its_flags(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
text = " ".join([*(os.environ.get(n, "-") for n in names), *sys.argv[3:]])
Path({str(tmp_path)!r}, "rank" + rank).write_text(text)
"""
    status, _, err = run(tmp_path, code, "--nproc_per_node", "2", "--own_flag", "x")
    assert status == 0, err
    flags = "--device cpu --nproc_per_node 2 --own_flag x"
    assert (tmp_path / "rank0").read_text() == f"0 0 2 {flags}"
    assert (tmp_path / "rank1").read_text() == f"1 1 2 {flags}"


@pytest.mark.parametrize(
    "flags",
    [
        ("--own-flag", "1", "--nproc-per-node", "1"),
        ("--own-flag", "--nproc-per-node=1"),
    ],
    ids=["same value twice", "switch"],
)
def test_flags_of_the_scripts_own_do_not_disturb_the_launch(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    status, out, err = run(tmp_path, "import sys; print(' '.join(sys.argv[5:]))", *flags)
    assert status == 0, err
    assert out.strip() == " ".join(flags)


def test_user_script_may_be_spelt_with_an_underscore(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    command = [sys.executable, "-m", "rapidformer.cli.main", f"--user_script={script}"]
    done = subprocess.run(
        [*command, "--own-flag", "3", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "here\n"


def test_message_of_the_process_that_failed_is_shown_once(tmp_path: Path) -> None:
    code = f"""
from rapidformer.errors import RapidformerError
if rank == "1":
    raise RapidformerError("the second one is unwell")
{WAIT}"""
    started = time.monotonic()
    status, out, err = run(tmp_path, code, "--nproc-per-node", "2")
    assert status == 1
    assert err == "error: rank 1: the second one is unwell\n", (
        "nothing of the launcher's own around it"
    )
    assert out == ""
    assert time.monotonic() - started < 60, "the other process is ended, not waited for"


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("raise SystemExit(7 if rank == '1' else 0)", 7, "rank 1 ended with status 7"),
        (
            "if rank == '1': raise ValueError('a defect')\n" + WAIT,
            1,
            "ValueError: a defect",
        ),
    ],
    ids=["exit status", "traceback"],
)
def test_exit_status_is_that_of_the_process_that_failed(
    code: str, status: int, text: str, tmp_path: Path
) -> None:
    found, _, err = run(tmp_path, code, "--nproc-per-node", "2")
    assert found == status
    assert err.count(text) == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_to_the_parent_ends_all_within_seconds(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        RANK
        + f"from pathlib import Path\nPath({str(tmp_path)!r}, 'pid' + rank)"
        + f".write_text(str(os.getpid()))\n{WAIT}"
    )
    process = start(script, "--nproc-per-node", "2")
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files):
        assert time.monotonic() < deadline and process.poll() is None, "the run did not start"
        time.sleep(0.05)
    children = [int(file.read_text()) for file in files]
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + getattr(signal, name)
    assert f"stopped by signal {name}" in err
    assert "Traceback" not in err
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_error_in_the_flags_is_told_before_any_process_is_started() -> None:
    command = [sys.executable, "-m", "rapidformer.cli.main", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--task", "masked_lm", "--epochs", "-1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "error: --epochs must not be negative, got -1.\n"
