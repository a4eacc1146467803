"""Take the disk from a run at a random moment, give it back, and start the run again.

The run must say in one sentence what is wrong, keep the checkpoints that it has, and train on if it
only lost a checkpoint in the background. Started again on a sound disk, it must equal a run that
nobody disturbed.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.campaign.kills import Reference, compare
from tests.faults.campaign.runs import LAYOUTS, Outcome, Run
from tests.faults.campaign.victim import BALLAST
from tests.processes import wait_until

ACTS = {
    "full disk": "fill", "no inodes": "inodes", "read-only": "lock", "vanished folder": "vanish",
}  # fmt: skip
FAULTS = (*ACTS, "two runs", "long path")
MOMENTS = ("forward", "open", "mkdir", "rename", "background write")
_MOUNT = ("mount", "-t", "tmpfs", "-o", "size=32m,nr_inodes=2000", "tmpfs")
_LAST_STEP = 15
"""The first of the last update's steps: a run that reaches it has trained to its end."""


@dataclass
class DiskFault:
    """One fault, and what was wrong with the answer to it."""

    fault: str
    layout: str
    where: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    has_trained_on: bool = False
    problems: list[str] = field(default_factory=list)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own for a folder; only root may mount one."""
    folder.mkdir(parents=True)
    subprocess.run([*_MOUNT, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def break_once(reference: Reference, folder: Path, fault: str, dice: random.Random) -> DiskFault:
    """One run with this fault, and the same run again without it."""
    layout = reference.run.layout
    run, found = Run(reference.run.python, folder, layout), DiskFault(fault, layout)
    if fault == "two runs":
        _start_twice(run, found)
    elif fault == "long path":
        _start_too_long(run, found, dice)
    elif fault == "vanished folder":
        _disturb(run, found, reference, dice)
        # The lines that were in the folder went with it.
        found.problems += [x for x in _run_again(run, reference) if "metrics.jsonl" not in x]
        return found
    else:
        with small_disk(run.save):
            _disturb(run, found, reference, dice)
            found.problems += _run_again(run, reference)
        return found
    found.problems += _run_again(run, reference)
    return found


def _disturb(run: Run, found: DiskFault, reference: Reference, dice: random.Random) -> None:
    moment = dice.choice(MOMENTS)
    found.where = {**reference.choose_fault(moment, dice), "act": ACTS[found.fault]}
    outcome = run.finish(run.start(found.where))
    run.wait_for_ranks()
    found.status = outcome.status
    found.has_trained_on = any(line["step"] >= _LAST_STEP for line in run.read_trace())
    found.problems += _judge(outcome)
    # The disk is sound again.
    subprocess.run(["mount", "-o", "remount,rw", run.save], check=False, capture_output=True)
    shutil.rmtree(run.save / BALLAST, ignore_errors=True)
    found.problems += [f"after the fault: {text}" for text in run.find_unreadable()]


def _judge(outcome: Outcome) -> Iterator[str]:
    if "Traceback" in outcome.output:
        yield f"a traceback: {outcome.output[-3000:]}"
    if outcome.status != 0 and outcome.output.count("error: ") != 1:
        yield f"{outcome.output.count('error: ')} errors: {outcome.output[-2000:]}"


def _start_twice(run: Run, found: DiskFault) -> None:
    """The second one is refused while the first one lives, which notices nothing."""
    first = run.start(WAIT_FOR="SIGUSR2")
    waiting = run.folder / "trace" / "waiting_0"
    wait_until(lambda: waiting.exists() or first.poll() is not None)
    outcome = run.finish(run.start())
    found.status = outcome.status
    if outcome.status == 0:
        found.problems.append("the second run was not refused")
    found.problems += _judge(outcome)
    run.kill()
    run.finish(first)
    run.wait_for_ranks()


def _start_too_long(run: Run, found: DiskFault, dice: random.Random) -> None:
    name = "x" * dice.choice([256, 300, 4000])
    deep = "/".join(["x" * 200] * 30)
    outcome = run.finish(run.start(save=run.save / dice.choice([name, deep])))
    found.status = outcome.status
    found.problems += _judge(outcome)
    if outcome.status == 0:
        found.problems.append("the path was not refused")
    shutil.rmtree(run.folder / "trace", ignore_errors=True)


def _run_again(run: Run, reference: Reference) -> Iterator[str]:
    outcome = run.finish(run.start())
    if outcome.status != 0:
        yield f"the restart failed with {outcome.status}: {outcome.output[-2000:]}"
    else:
        yield from compare(run, reference)


def run_disks(
    python: Path, folder: Path, *, runs: int, seed: int, layouts: list[str] | None = None
) -> Iterator[DiskFault]:
    """All kinds of faults in turn, in each layout."""
    dice = random.Random(seed)
    references = [
        Reference(python, folder / f"reference_{number}", name)
        for number, name in enumerate(layouts or list(LAYOUTS)[:2])
    ]
    plan = [(reference, fault) for fault in FAULTS for reference in references]
    for number in range(runs):
        reference, fault = plan[number % len(plan)]
        place = folder / f"disk_{number}"
        found = break_once(reference, place, fault, dice)
        if not found.problems:
            shutil.rmtree(place)
        yield found
