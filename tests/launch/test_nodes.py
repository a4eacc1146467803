"""Runs over two nodes: killed processes, killed nodes, and what each node says at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launch.commands import Command
from tests.processes import wait_until

SCRIPT = Path(__file__).parent / "training.py"


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_killed_worker_and_killed_node_cost_only_the_steps_since_the_last_checkpoint(
    begin: Callable[..., Command], python: Path, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    words = [
        *("--max-restarts", "3"), SCRIPT, "--save", save, "--save-interval", "2",
        *("--train-iters", "14", "--log-interval", "1", "--micro-batch-size", "4"),
        *("--lr", "0.05", "--optimizer", "sgd", "--no-progress"),
    ]  # fmt: skip
    # Node 1's rank hangs after 5 steps, at step 5 and then at step 9, until it is killed.
    started = [
        begin(0, *words, python=python),
        begin(1, *words, python=python, STEPS="5"),
    ]

    def describe() -> str:
        return "\n".join(command.describe() for command in started)

    def has_saved(step: int) -> bool:
        assert all(command.is_running() for command in started), describe()
        return (save / f"iter_{step:07d}" / "run.json").exists()

    wait_until(lambda: has_saved(4), describe=describe)
    os.kill(int((save / "pids" / "0_1").read_text().rstrip(".")), signal.SIGKILL)
    wait_until(lambda: has_saved(8), describe=describe)
    started[1].send(signal.SIGKILL)
    started[1].wait()
    started[1] = begin(1, *words, python=python)

    assert [command.wait() for command in started] == [0, 0], describe()
    steps = [line["step"] for line in read_steps(save) if "loss" in line]
    assert steps == list(range(1, 15)), "each once, though some were done twice"
    log = (save / "logs" / "rank_0.log").read_text()
    assert log.count("resumed   from") == 2
    assert "attempt 2 ===" in log
    assert f"rank 1 (node 1, {socket.gethostname()}) was ended by signal SIGKILL" in started[0].err
    assert "restart 1 of 3" in started[0].err
    assert "restart 2 of 3" in started[0].err


def test_every_node_tells_the_first_failure_with_its_rank_and_node(
    begin: Callable[..., Command], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('only here')\n"
        "time.sleep(600)\n"
    )
    started = [begin(rank, script) for rank in (0, 1)]
    for command in started:
        assert command.wait() == 1
        assert f"error: rank 1 (node 1, {socket.gethostname()}) failed:" in command.err
        assert command.err.rstrip().endswith("ValueError: only here")


def test_stop_of_one_node_stops_the_other(begin: Callable[..., Command], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'here' + os.environ['RANK']).touch()\ntime.sleep(600)\n"
    )
    started = [begin(rank, script) for rank in (0, 1)]
    wait_until(lambda: all((tmp_path / f"here{rank}").exists() for rank in (0, 1)))
    started[1].send(signal.SIGTERM)
    assert [command.wait() for command in started] == [143, 143]
    assert started[0].err == "error: node 1 was stopped by signal SIGTERM.\n"


def test_node_that_nobody_comes_to_says_who_is_missing(
    begin: Callable[..., Command], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    for rank, text in ((0, "node 1 (never seen) did not come"), (1, "node 0 cannot be reached")):
        alone = begin(rank, "--distributed-timeout-minutes", "0.01", script)
        assert alone.wait() == 1
        assert alone.err.startswith(f"error: {text}"), alone.err


def test_two_nodes_of_one_number_are_refused(begin: Callable[..., Command], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import time; open({str(tmp_path / 'here')!r}, 'w').close(); time.sleep(600)"
    )
    started = [begin(rank, script) for rank in (0, 1)]
    wait_until((tmp_path / "here").exists, describe=started[1].describe)
    double = begin(1, script)
    assert double.wait() == 1
    assert "is taking part already: every node needs a NODE_RANK of its own" in double.err
    assert all(command.is_running() for command in started), "the run itself goes on"
