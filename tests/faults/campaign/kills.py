"""Kill a run with SIGKILL at a random moment, start it again, and compare it with one that lived.

Nothing may be lost or repeated: after the restart, every step has the samples and the exact losses
of the uninterrupted run, the model is the same to the bit, and the folder holds nothing else.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.campaign.runs import LAYOUTS, Run

MOMENTS = (
    "forward", "evaluate", "open", "mkdir", "rename", "remove", "background write", "any time",
)  # fmt: skip
Steps = dict[tuple[int, int], list[tuple[tuple[int, ...], str]]]
"""Samples and losses of the micro-batches, by rank and step."""


@dataclass
class Kill:
    """One kill, and what was wrong after the restart."""

    layout: str
    moment: str
    fault: dict[str, Any]
    was_killed: bool = False
    problems: list[str] = field(default_factory=list)


class Reference:
    """A run that nobody disturbs."""

    def __init__(self, python: Path, folder: Path, layout: str) -> None:
        self.run = Run(python, folder, layout)
        began = time.monotonic()
        outcome = self.run.finish(self.run.start())
        self.seconds = time.monotonic() - began
        assert outcome.status == 0, outcome.output
        self.steps = collect_steps(self.run.read_trace())
        self.metric_steps = self.run.read_metric_steps()
        self.model = self.run.hash_model()
        self.ranks = 1 + max(rank for rank, _ in self.steps)

    def choose_fault(self, moment: str, dice: random.Random) -> dict[str, Any]:
        """A random one of this kind of moment, on a random rank that has any."""
        choices = [r for r in range(self.ranks) if self.run.read_counts(r).get(moment)]
        rank = dice.choice(choices)
        count = dice.randint(1, self.run.read_counts(rank)[moment])
        return {"at": moment, "count": count, "rank": rank, "all": dice.random() < 0.5}


def collect_steps(trace: list[dict[str, Any]]) -> Steps:
    """What each step was made of; a later attempt replaces the steps that it repeats."""
    by_attempt: dict[int, Steps] = defaultdict(lambda: defaultdict(list))
    for line in trace:
        value = tuple(line["samples"]), line["loss"]
        by_attempt[int(line["attempt"])][line["rank"], line["step"]].append(value)
    merged: Steps = {}
    for attempt in sorted(by_attempt):
        first = min(step for _, step in by_attempt[attempt])
        merged = {key: value for key, value in merged.items() if key[1] < first}
        merged |= by_attempt[attempt]
    return merged


def kill_once(reference: Reference, folder: Path, moment: str, dice: random.Random) -> Kill:
    """One run, killed and started again with the same command."""
    layout = reference.run.layout
    run = Run(reference.run.python, folder, layout)
    if moment == "any time":
        kill = Kill(layout, moment, {"after": dice.uniform(0, reference.seconds)})
        process = run.start()
        time.sleep(kill.fault["after"])
        run.kill()
    else:
        kill = Kill(layout, moment, reference.choose_fault(moment, dice))
        process = run.start(kill.fault)
    kill.was_killed = run.finish(process).status != 0
    run.wait_for_ranks()
    kill.problems += [f"after the kill: {text}" for text in run.find_unreadable()]
    outcome = run.finish(run.start())
    if outcome.status != 0:
        kill.problems.append(f"the restart failed with {outcome.status}: {outcome.output[-2000:]}")
        return kill
    kill.problems += compare(run, reference)
    return kill


def compare(run: Run, reference: Reference) -> Iterator[str]:
    """What differs from the uninterrupted run."""
    found = collect_steps(run.read_trace())
    for key in sorted(reference.steps.keys() | found.keys()):
        expected, actual = reference.steps.get(key, []), found.get(key, [])
        where = f"rank {key[0]}, step {key[1]}"
        if [samples for samples, _ in expected] != [samples for samples, _ in actual]:
            yield f"{where}: other samples: {actual} instead of {expected}"
        elif expected != actual:
            yield f"{where}: other losses: {actual} instead of {expected}"
    if run.read_metric_steps() != reference.metric_steps:
        yield f"metrics.jsonl has steps {run.read_metric_steps()}"
    if run.hash_model() != reference.model:
        yield "the final model differs"
    yield from run.find_unreadable()
    yield from (f"left behind: {name}" for name in run.find_leftovers())


def run_kills(
    python: Path, folder: Path, *, runs: int, seed: int, layouts: list[str] | None = None
) -> Iterator[Kill]:
    """Kills in turn over layouts and kinds of moments, each at a random one."""
    dice = random.Random(seed)
    references = {
        name: Reference(python, folder / f"reference_{number}", name)
        for number, name in enumerate(layouts or LAYOUTS)
    }
    plan = [(layout, moment) for moment in MOMENTS for layout in references]
    for number in range(runs):
        layout, moment = plan[number % len(plan)]
        place = folder / f"kill_{number}"
        kill = kill_once(references[layout], place, moment, dice)
        if not kill.problems:
            shutil.rmtree(place)
        yield kill
