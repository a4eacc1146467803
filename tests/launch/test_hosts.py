"""Hostfiles: what they hold, the ssh commands made of them, runs over a stand-in for ssh."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapidformer.config import parse_arguments
from rapidformer.errors import ConfigurationError
from rapidformer.launch.environment import plan_launch
from rapidformer.launch.hosts import Host, build_command, parse_hostfile, plan_hosts
from tests.launch.commands import Command
from tests.processes import is_alive, wait_until
from tests.warm_python import REAL_RANKS_VARIABLE

Start = Callable[..., Command]
REAL_RANKS = {REAL_RANKS_VARIABLE: "1"}
"""Agents are forks of the warm Python; the ranks that die with them are not."""


def test_hostfile_with_comments_and_empty_lines() -> None:
    text = "# ours\n\nnode-a slots=8\n  10.0.0.2   slots = 4  # old\nalias\n"
    assert parse_hostfile(text) == [Host("node-a", 8), Host("10.0.0.2", 4), Host("alias", None)]


def test_every_bad_line_is_reported() -> None:
    text = "a slots=2\nb slots=zero\na slots=2\nc 4\n-oProxyCommand=x\nd slots=0\n"
    with pytest.raises(ConfigurationError) as caught:
        parse_hostfile(text, "hosts")
    told = caught.value.problems
    assert [problem.partition(":")[0] for problem in told] == [
        f"--hostfile hosts, line {number}" for number in (2, 3, 4, 5, 6)
    ]
    assert "a comes twice" in told[1]
    with pytest.raises(ConfigurationError, match="names no host"):
        parse_hostfile("# nobody\n")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z0-9][a-z0-9.-]{0,9}", fullmatch=True), st.integers(1, 64), min_size=1
    )
)
def test_what_is_written_is_read(hosts: dict[str, int]) -> None:
    text = "\n".join(f"{name} slots={slots}" for name, slots in hosts.items())
    assert parse_hostfile(text) == [Host(name, slots) for name, slots in hosts.items()]


def test_ssh_command_carries_folder_variables_and_the_command_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = parse_arguments(
        ["--hostfile", "f", "--ssh-port", "2222", "--ssh-user", "me", "--ssh-command", "ssh -q"]
    )
    monkeypatch.delenv("MASTER_PORT", raising=False)
    hosts = [Host("node-a", 2), Host("node-b", None)]
    plans = plan_hosts(hosts, settings)
    variables = {
        "NCCL_DEBUG": "INFO", "HF_HOME": "/a b", "HF_TOKEN": "secret", "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin", "WANDB_API_KEY": "secret",
    }  # fmt: skip
    argv = ["launch", "my script.py", "--x", "$HOME"]
    command = build_command(hosts[1], plans[1], argv, settings, variables)
    assert command[:-1] == [
        "ssh", "-q", "-o", "BatchMode=yes", "-p", "2222", "-l", "me", "node-b",
    ]  # fmt: skip
    words = shlex.split(command[-1])
    assert words[:4] == ["cd", str(Path.cwd()), "&&", "exec"]
    passed = dict(word.split("=", 1) for word in words[5 : words.index("-m") - 1])
    node = json.loads(passed.pop("RAPIDFORMER_NODE"))
    assert passed == {"NCCL_DEBUG": "INFO", "HF_HOME": "/a b", "PATH": "/bin"}, "no secrets"
    assert (node["nodes"], node["node_rank"], node["processes"]) == (2, 1, 0)
    assert (node["master_addr"], node["master_port"]) == ("node-a", 29500)
    assert words[-5:] == ["rapidformer.cli.main", *argv]
    monkeypatch.setenv("RAPIDFORMER_NODE", plans[1].to_text())
    assert plan_launch(parse_arguments(["--device", "cpu", "--nnodes", "9"])).nodes == 2
    local = build_command(Host(socket.gethostname(), 1), plans[0], argv, settings, variables)
    assert local[0] == "env", "this machine needs no ssh"


def test_others_cannot_meet_at_a_name_that_means_themselves() -> None:
    hosts = [Host("localhost", 1), Host("b", 1)]
    with pytest.raises(ConfigurationError, match="cannot reach node 0 by the name localhost"):
        plan_hosts(hosts, parse_arguments([]))
    assert plan_hosts(hosts, parse_arguments(["--master-addr", "a"]))[0].master_addr == "a"


# ---- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def launch(start: Start, tmp_path: Path) -> Callable[..., Command]:
    """Two hosts, reached by a program that runs the remote command on this machine."""
    ssh = tmp_path / "ssh"
    # As sshd does: a shell, in a session of its own, that a hang-up does not end.
    ssh.write_text(
        "#!/bin/sh\n"
        "for last; do host=$prev; prev=$last; done\n"
        f'echo "$host" >> {tmp_path}/called\n'
        '[ "$host" = unreachable ] && exit 255\n'
        'exec setsid --wait sh -c \'sh -c "$1"; exit $?\' - "$last"\n'
    )
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=2\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def begin(code: str, *flags: object, **options: Any) -> Command:
        script = tmp_path / "script.py"
        script.write_text("import os, sys, time\nrank = os.environ['RANK']\n" + code)
        return start(
            "launch", "--hostfile", tmp_path / "hosts", "--ssh-command", ssh,
            "--master-port", port, "--device", "cpu", *flags, script, **options,
        )  # fmt: skip

    return begin


def test_run_over_hosts_with_unequal_slots(launch: Callable[..., Command], python: Path) -> None:
    code = "print(rank, os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], os.environ['HF_TOKEN'])"
    command = launch(code, python=python, HF_TOKEN="secret")
    assert command.wait() == 0, command.err
    assert sorted(command.out.splitlines()) == ["0 0 3 secret", "1 0 3 secret", "2 1 3 secret"]


def test_first_failure_of_any_host_is_shown_once(
    launch: Callable[..., Command], python: Path
) -> None:
    command = launch("if rank == '2': raise ValueError('here')\ntime.sleep(600)", python=python)
    assert command.wait() == 1
    assert command.err.count("ValueError: here") == 1, command.err
    assert f"rank 2 (node 1, {socket.gethostname()}) failed" in command.err


def test_rank_that_was_killed_is_not_taken_for_a_lost_host(
    launch: Callable[..., Command], python: Path
) -> None:
    """Both have status 137; only a lost host is worth a word of its own, or another start."""
    command = launch("if rank == '2': os.kill(os.getpid(), 9)\ntime.sleep(600)", python=python)
    assert command.wait() == 137
    assert command.err.startswith(f"error: rank 2 (node 1, {socket.gethostname()}) was ended by ")
    assert command.err.count("\n") == 1, command.err


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_signal_to_the_launcher_ends_the_hosts_too(
    name: str, launch: Callable[..., Command], python: Path, tmp_path: Path
) -> None:
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path)!r} + "/pid" + rank, "w").write(f"{{os.getpid()}} {{child.pid}} .")
time.sleep(600)
"""
    command = launch(code, python=python, **REAL_RANKS)
    files = [tmp_path / f"pid{rank}" for rank in range(3)]
    wait_until(
        lambda: all(f.exists() and f.read_text().endswith(".") for f in files),
        describe=command.describe,
    )
    pids = [int(word) for f in files for word in f.read_text().split()[:2]]
    command.send(getattr(signal, name))
    status = command.wait()
    wait_until(lambda: not any(map(is_alive, pids)))
    if name != "SIGKILL":
        assert status == 128 + getattr(signal, name)
        assert command.err == f"error: stopped by signal {name}.\n"


def test_lost_host_is_started_again(
    launch: Callable[..., Command], python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent is killed; the run goes on with another one."""
    monkeypatch.setattr("rapidformer.launch.hosts._GRACE_SECONDS", 0.3)
    code = f"""
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open({str(tmp_path)!r} + "/agent" + rank, "w").write(f"{{os.getppid()}}.")
    time.sleep(600)
"""
    command = launch(code, "--max-restarts", "1", python=python, **REAL_RANKS)
    file = tmp_path / "agent2"
    wait_until(lambda: file.exists() and file.read_text().endswith("."), describe=command.describe)
    os.kill(int(file.read_text().rstrip(".")), signal.SIGKILL)
    assert command.wait() == 0, command.err
    assert "node 1 (127.0.0.3) is lost (status 137): started again" in command.err
    assert "restart 1 of 1" in command.err


def test_host_that_ssh_cannot_reach_is_named(
    launch: Callable[..., Command], python: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.2 slots=1\nunreachable slots=1\n")
    command = launch("", python=python)
    assert command.wait() == 255
    assert "error: node 1 (unreachable) cannot be used over ssh: try `" in command.err
    assert "It must work without a password" in command.err
    assert "Traceback" not in command.err, "of the hosts that could be reached\n" + command.err
