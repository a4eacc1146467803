"""Stalls: who is missing, where, with which stack."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapidformer.dist import heartbeat
from rapidformer.launch.watch import (
    Beat,
    Watch,
    describe_stall,
    find_missing,
    is_stalled,
    read_beat,
)
from tests.launch.commands import Command
from tests.processes import wait_until

Start = Callable[..., Command]
STALL = """
import os, sys, time
from rapidformer.dist.heartbeat import beat, start_heartbeat

def wait_for_ever():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    sys.exit()

rank = int(os.environ["RANK"])
start_heartbeat(rank)
# Nobody is ahead while the other is still being started: that would be a stall of its own.
open(f"{sys.argv[1]}_{rank}", "w").close()
while not os.path.exists(f"{sys.argv[1]}_{1 - rank}"):
    time.sleep(0.01)
for step in range(1, 4):
    beat("data", step)
    if step == 3 and rank == 1:
        wait_for_ever()
    beat("backward", step)
wait_for_ever()
"""


def make(rank: int, count: int = 4, step: int = 2, phase: str = "data", **values: Any) -> Beat:
    base: dict[str, Any] = {"node": 0, "age": 60.0}
    return Beat(rank=rank, count=count, step=step, phase=phase, **(base | values))


def test_stall_is_when_nobody_moves() -> None:
    behind, ahead = make(0), make(1, count=5, phase="backward")
    assert is_stalled([behind, ahead], 30)
    assert not is_stalled([behind, make(1, count=5, age=3.0)], 30)
    assert is_stalled([behind, make(1, count=5, age=3.0, has_ended=True)], 30)
    assert not is_stalled([], 30)


@pytest.mark.parametrize("phase", ["start", "end"])
def test_long_work_of_all_before_or_after_training_is_not_a_stall(phase: str) -> None:
    assert not is_stalled([make(0, phase=phase), make(1, phase=phase)], 30)
    assert is_stalled([make(0, phase=phase), make(1, phase=phase, count=3)], 30)


def test_missing_are_those_behind() -> None:
    beats = [make(0, count=9), make(1, count=8), make(2, count=9), make(3, count=12, step=1)]
    assert [beat.rank for beat in find_missing(beats)] == [1, 3]
    assert find_missing([make(0), make(1)]) == [make(0), make(1)], "nobody in particular"


def test_report_names_rank_node_step_and_phase() -> None:
    beats = [make(0, count=5, phase="backward"), make(1, node=1), make(2, count=5, phase="update")]
    text = describe_stall(beats, find_missing(beats), {1: "File x\nFile y"}, nodes=2)
    assert text.splitlines()[1:] == [
        "  rank 1 (node 1) is missing: step 2, phase data, for 60 s",
        "  waiting for it: step 2, phase backward (rank 0); step 2, phase update (rank 2)",
        "  stack of rank 1:",
        "    File x",
        "    File y",
    ]
    ended = describe_stall(
        [make(0, count=5), make(1, has_ended=True)], [make(1, has_ended=True)], {}, 1
    )
    assert "rank 1 has ended: step 2, phase data" in ended
    assert "nobody is behind" in describe_stall([make(0)], [make(0)], {}, 1)


def test_a_suspended_rank_is_named_with_the_way_to_wake_it(beating: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        awake = read_beat(beating, 0, 0, sleeper.pid)
        assert awake is not None and awake.suspended_pid is None
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        found = read_beat(beating, 0, 0, sleeper.pid)
        assert found is not None and found.suspended_pid == sleeper.pid
        text = describe_stall([found, make(1, count=99)], [found], {}, nodes=1)
        assert f"rank 0 is suspended (`kill -CONT {sleeper.pid}` wakes it)" in text
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_suspended_rank_is_missing_though_nobody_is_behind() -> None:
    beats = [make(0), make(1, suspended_pid=7)]
    text = describe_stall(beats, find_missing(beats), {}, nodes=1)
    assert "  rank 1 is suspended (`kill -CONT 7` wakes it): step 2, phase data, for 60 s" in text
    assert "  waiting for it: step 2, phase data (rank 0)" in text
    text = describe_stall(beats[1:], beats[1:], {}, nodes=1)
    assert "rank 1 is suspended" in text and "waiting for it" not in text


def test_stall_is_said_once_though_others_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: Any = SimpleNamespace(plan=SimpleNamespace(nodes=1, node_rank=0))
    said: list[str] = []
    watch = Watch(tmp_path, rounds, stall_seconds=30, say=said.append)
    watch.begin_round(0, {0: 1, 1: 2})
    now: list[Beat] = []
    monkeypatch.setattr(watch, "_read_beats", lambda pids: now)
    monkeypatch.setattr(watch, "_collect_stacks", lambda ranks, pids: {})

    def look(*beats: Beat) -> int:
        now[:] = beats
        watch._look(1)
        return len(said)

    assert look(make(0, count=5), make(1)) == 1
    assert look(make(0, count=6, phase="end", age=1.0), make(1)) == 1
    assert look(make(0, count=6, phase="end"), make(1)) == 1, "it is still rank 1"
    assert watch.stall == "rank 1 was missing at step 2, phase data"
    assert look(make(0, count=7, age=1.0), make(1, count=7, age=1.0)) == 1
    assert watch.stall == "", "it has come"
    assert look(make(0, count=8), make(1, count=7)) == 2


@pytest.fixture
def beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RAPIDFORMER_HEARTBEATS", str(tmp_path))
    monkeypatch.setattr(heartbeat, "_own", heartbeat._Heartbeat())
    (tmp_path / "beat_0").write_text("0 0 start 0 0".ljust(127) + "\n")
    heartbeat.start_heartbeat(0)
    yield tmp_path


def test_beats_are_read_as_they_were_written(beating: Path) -> None:
    heartbeat.beat("forward", 7)
    with heartbeat.in_phase("save"):
        found = read_beat(beating, 0, 0, os.getpid())
        assert found is not None
        assert (found.count, found.step, found.phase, found.has_ended) == (2, 7, "save", False)
        assert 0 <= found.age < 60
    found = read_beat(beating, 0, 0, os.getpid())
    assert found is not None and (found.count, found.phase) == (3, "forward")
    (beating / "beat_0").write_text("4 7 forw")
    assert read_beat(beating, 0, 0, os.getpid()) is None, "caught in the middle of writing"


def test_engine_says_where_it_is(beating: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase of an update, in its order, with the number of the update in progress."""
    from rapidformer import RapidformerEngine
    from rapidformer.data import loader as loader_module
    from rapidformer.engine import backward, current_batch, updates
    from rapidformer.engine import engine as engine_module
    from tests.launch.training import LineTrainer

    seen: list[tuple[str, int]] = []

    def note(phase: str, step: int | None = None) -> None:
        original(phase, step)
        seen.append((phase, heartbeat._own.step))

    original = heartbeat.beat
    for module in (heartbeat, engine_module, current_batch, backward, updates, loader_module):
        monkeypatch.setattr(module, "beat", note)
    settings = {"micro_batch_size": 4, "train_iters": 2, "lr": 0.1, "save": str(beating / "run")}
    settings |= {"device": "cpu", "log_level": "error", "optimizer": "sgd", "save_interval": 2}
    LineTrainer(RapidformerEngine(args=settings)).train()
    update = ["forward", "backward", "update"]
    assert [phase for phase, _ in seen[:8]] == ["data", *update, "data", *update]
    assert [step for _, step in seen[1:8]] == [1, 1, 1, 1, 2, 2, 2]
    assert ("save", 2) in seen


def test_missing_rank_is_reported_with_its_stack(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STALL)
    flags = ("--nproc-per-node", "2", "--stall-timeout-minutes", "0.05")
    command = start("launch", *flags, script, tmp_path / "told")
    wait_until(lambda: " in wait_for_ever" in command.err, describe=command.describe)
    (tmp_path / "told").touch()
    assert command.wait() == 0, command.err
    check_report(command.err, "rank 1")


def test_suspended_rank_is_reported_and_the_run_goes_on_when_it_wakes(
    start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    ending = "os.kill(os.getpid(), 19) if rank else None\nwait_for_ever()\n"
    lines = STALL.replace("    if step == 3 and rank == 1:\n        wait_for_ever()\n", "")
    script.write_text(lines.removesuffix("wait_for_ever()\n") + ending)
    flags = ("--nproc-per-node", "2", "--stall-timeout-minutes", "0.05")
    command = start("launch", *flags, script, tmp_path / "told")
    wake = re.compile(r"  rank 1 is suspended \(`kill -CONT (\d+)` wakes it\): step 3, phase back")
    wait_until(lambda: wake.search(command.err), describe=command.describe)
    os.kill(int(wake.search(command.err)[1]), signal.SIGCONT)  # type: ignore[index]
    (tmp_path / "told").touch()
    assert command.wait() == 0, command.err


def test_missing_rank_of_another_node_is_reported_by_node_0(
    begin: Callable[..., Command],
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(STALL)
    words = ("--stall-timeout-minutes", "0.05", script, tmp_path / "told")
    started = [begin(rank, *words) for rank in (0, 1)]
    wait_until(lambda: " in wait_for_ever" in started[0].err, describe=started[0].describe)
    (tmp_path / "told").touch()
    assert [command.wait() for command in started] == [0, 0], started[0].err
    check_report(started[0].err, "rank 1 (node 1)")
    assert "stalled" not in started[1].err


def check_report(text: str, who: str) -> None:
    assert text.count("stalled: no rank has moved for") == 1, text
    assert f"  {who} is missing: step 3, phase data, for " in text
    assert "  waiting for it: step 3, phase backward (rank 0)" in text
    assert "runpy" not in text


def test_a_rank_that_is_asked_for_its_stack_at_its_end_is_not_ended_by_it(tmp_path: Path) -> None:
    """Python's finalization takes faulthandler's handler away."""
    script = (
        "import faulthandler, os\n"
        "from rapidformer.launch.worker import STACK_SIGNAL, attach_to_launcher\n"
        "attach_to_launcher()\n"
        "os.kill(os.getpid(), STACK_SIGNAL)\n"
        "faulthandler.unregister(STACK_SIGNAL)\n"
        "os.kill(os.getpid(), STACK_SIGNAL)\n"
    )
    environment = {**os.environ, "RAPIDFORMER_HEARTBEATS": str(tmp_path), "RANK": "0"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert result.returncode == 0
    assert "most recent call first" in (tmp_path / "stack_0").read_text()
