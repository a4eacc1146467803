"""Start every node of a hostfile over ssh, from one command.

A host runs the command the user typed, in the same folder, with the relevant environment; a
variable tells it which node it is. Ending ssh does not end what it started, so each node treats its
standard input as a lifeline and stops when it closes. Whatever happens to this process, nothing is
left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rapidformer.config.reading import read_settings_text, split_words
from rapidformer.config.sections import LaunchArguments
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.launch.environment import NODE_VARIABLE, LaunchPlan
from rapidformer.launch.failures import WorkerError
from rapidformer.launch.signals import handling

_DEFAULT_PORT = 29500
_LINE = re.compile(r"(?P<name>[^\s=]+)(?:\s+slots\s*=\s*(?P<slots>\d+))?")
# What processes on other machines need in order to behave as they would here.
_PASSED_ON = re.compile(
    r"(RAPIDFORMER|NCCL|GLOO|TORCH|PYTORCH|CUDA|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|OMP|MKL|"
    r"WANDB|UCX|FI|OMPI|PYTHON)[A-Z0-9]*_\w+|PYTHON\w*|PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|"
    r"(HTTPS?|NO|https?|no)_(PROXY|proxy)"
)
_NOT_PASSED_ON = frozenset({"CUDA_VISIBLE_DEVICES", NODE_VARIABLE, "PYTHONSTARTUP"})
# Sent down the lifeline, never on a command line, which everyone on the host can read.
_SECRET = re.compile(r"TOKEN$|KEY|SECRET|PASSWORD")
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS = 15.0
_GRACE_SECONDS = 3.0
# ssh itself failed, or the node was killed from outside: the run did not end by itself.
_LOST = (255, 128 + signal.SIGKILL, -signal.SIGKILL)
# What a node returns instead if these are a rank's own statuses: its agent is fine.
_SAID_INSTEAD = {255: 254, 128 + signal.SIGKILL: 253}


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int | None
    """Number of processes; None means one per GPU."""


def parse_hostfile(text: str, path: str = "hostfile") -> list[Host]:
    """Lines ``host slots=N``; blank lines and comments (#) are ignored, every bad line is told."""
    hosts: dict[str, Host] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None or match["slots"] == "0" or match["name"].startswith("-"):
            problems.append(
                f"--hostfile {path}, line {number}: {content!r} is not `host slots=N`, N from 1."
            )
        elif match["name"] in hosts:
            problems.append(f"--hostfile {path}, line {number}: {content.split()[0]} comes twice.")
        else:
            slots = None if match["slots"] is None else int(match["slots"])
            hosts[match["name"]] = Host(match["name"], slots)
    if not hosts and not problems:
        problems.append(f"--hostfile {path} names no host.")
    raise_problems(problems)
    return list(hosts.values())


def plan_hosts(hosts: list[Host], settings: LaunchArguments) -> list[LaunchPlan]:
    """A plan for each host, in file order."""
    port = settings.master_port or int(os.environ.get("MASTER_PORT") or _DEFAULT_PORT)
    address = settings.master_addr or hosts[0].name
    if len(hosts) > 1 and settings.master_addr is None and is_this_machine(address, only_loop=True):
        raise ConfigurationError(
            f"the other hosts cannot reach node 0 by the name {address}: put its own name or "
            "address first in the hostfile, or give --master-addr."
        )
    return [
        LaunchPlan(
            processes=host.slots or 0, nodes=len(hosts), node_rank=rank, master_addr=address,
            master_port=port, has_lifeline=True,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def is_this_machine(name: str, *, only_loop: bool = False) -> bool:
    """Whether a host is started without ssh."""
    names = {"localhost", "127.0.0.1", "::1"}
    return name in (names if only_loop else names | {socket.gethostname(), socket.getfqdn()})


def build_command(
    host: Host,
    plan: LaunchPlan,
    argv: list[str],
    settings: LaunchArguments,
    variables: Mapping[str, str],
) -> list[str]:
    """The command that starts the node: ssh, or the plain command if the host is this machine."""
    command = [sys.executable, "-m", "rapidformer.cli.main", *argv]
    if is_this_machine(host.name):
        return ["env", f"{NODE_VARIABLE}={plan.to_text()}", *command]
    passed = _choose_variables(variables, is_secret=False) | {NODE_VARIABLE: plan.to_text()}
    words = ["exec", "env", *(f"{name}={value}" for name, value in sorted(passed.items()))]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([*words, *command])}"
    problems: list[str] = []
    ssh = split_words(settings.ssh_command, problems, "--ssh-command")
    raise_problems(problems)
    # Without a terminal nobody can answer: a password prompt or an unknown host is an error.
    ssh += ["-o", "BatchMode=yes"]
    if settings.ssh_port is not None:
        ssh += ["-p", str(settings.ssh_port)]
    if settings.ssh_user is not None:
        ssh += ["-l", settings.ssh_user]
    return [*ssh, host.name, remote]


def _choose_variables(variables: Mapping[str, str], *, is_secret: bool) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if _PASSED_ON.fullmatch(name) and name not in _NOT_PASSED_ON
        if bool(_SECRET.search(name)) == is_secret
    }


@dataclass
class _Node:
    host: Host
    plan: LaunchPlan
    command: list[str]
    process: subprocess.Popen[bytes]
    lives: int = 1
    status: int | None = None

    @property
    def name(self) -> str:
        return f"node {self.plan.node_rank} ({self.host.name})"


def launch_hosts(
    argv: list[str], settings: LaunchArguments, say: Callable[[str], None] = lambda text: None
) -> None:
    """Start all nodes, wait for them, and stop all if one fails."""
    file = settings.hostfile or ""
    hosts = parse_hostfile(read_settings_text(file, "--hostfile"), file)
    plans = plan_hosts(hosts, settings)
    nodes: list[_Node] = []
    with handling(_ENDINGS, _raise_signal):
        try:
            for host, plan in zip(hosts, plans, strict=True):
                command = build_command(host, plan, argv, settings, os.environ)
                nodes.append(_Node(host, plan, command, _start(command)))
            _wait_for_nodes(nodes, settings, say)
        except _Signal as caught:
            number = caught.signal
            _stop(nodes, number)
            raise WorkerError(f"stopped by signal {number.name}.", 128 + number) from None
        finally:
            _stop(nodes, signal.SIGTERM)


def disguise_status(code: int) -> int:
    """The status of a node that ends by itself; it must not look like a lost node."""
    return _SAID_INSTEAD.get(code, code)


class _Signal(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _raise_signal(number: int, frame: object) -> None:
    raise _Signal(number)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        # In its own session: Ctrl-C reaches a node only through the lifeline, and only once.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as reason:
        raise ConfigurationError(f"{command[0]} cannot be run: {reason.strerror}.") from None
    secrets = _choose_variables(os.environ, is_secret=True)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already; that is noticed soon
        process.stdin.write(json.dumps(secrets).encode() + b"\n")
        process.stdin.flush()
    return process


def _wait_for_nodes(
    nodes: list[_Node], settings: LaunchArguments, say: Callable[[str], None]
) -> None:
    lost: tuple[_Node, float] | None = None
    while any(node.status is None for node in nodes):
        time.sleep(0.1)
        for node in nodes:
            if node.status is not None or (status := node.process.poll()) is None:
                continue
            node.status = status
            if status in _LOST and lost is None:
                lost = node, time.monotonic()
            elif status != 0 and lost is None:
                # It has notified the others; give them a moment to stop by themselves.
                deadline = time.monotonic() + 2 * _GRACE_SECONDS
                while time.monotonic() < deadline and any(n.process.poll() is None for n in nodes):
                    time.sleep(0.05)
                raise _build_error(node, is_told=True)
        if lost is not None and time.monotonic() - lost[1] > _GRACE_SECONDS:
            node, lost = lost[0], None
            _revive(node, nodes, settings, say)
    failed = [node for node in nodes if node.status]
    if failed:
        raise _build_error(failed[0], is_told=failed[0].status not in _LOST)


def _revive(
    node: _Node, nodes: list[_Node], settings: LaunchArguments, say: Callable[[str], None]
) -> None:
    """Restart a lost node if allowed; node 0 cannot be restarted, because it holds the store."""
    if node.plan.node_rank == 0 or node.lives > settings.max_restarts:
        raise _build_error(node, is_told=False)
    ended = [other for other in nodes if other is not node and other.status is not None]
    if ended:
        raise _build_error(ended[0] if ended[0].status else node, is_told=bool(ended[0].status))
    node.lives += 1
    say(f"{node.name} is lost (status {node.status}): started again")
    node.process, node.status = _start(node.command), None


def _build_error(node: _Node, *, is_told: bool) -> WorkerError:
    is_lost, status = node.status in _LOST, node.status or 1
    status = next((code for code, said in _SAID_INSTEAD.items() if said == status), status)
    what = f"{node.name} ended with status {status}"
    if is_lost and status == 255 and not is_this_machine(node.host.name):
        what = (
            f"{node.name} cannot be used over ssh: try `{shlex.join(node.command[:-1])} true`. "
            "It must work without a password"
        )
    error = WorkerError(what + ".", status if status > 0 else 128 - status)
    # Node 0 has already shown the first failure.
    error.is_told = is_told
    return error


def _stop(nodes: list[_Node], number: signal.Signals) -> None:
    """Forward a signal, cut the lifelines, and wait; a second Ctrl-C must leave no one behind."""
    alive = [node for node in nodes if node.process.poll() is None]
    with handling(_ENDINGS, signal.SIG_IGN):
        for node in alive:
            assert node.process.stdin is not None
            with contextlib.suppress(OSError):  # it is ending already
                node.process.stdin.write(f"{number.name}\n".encode())
                node.process.stdin.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for node in alive:
            try:
                node.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
