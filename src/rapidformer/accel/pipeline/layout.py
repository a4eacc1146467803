"""Which blocks form a stage, and on which rank each stage lives.

Stages are balanced by cost: the head of a language model may cost as much as several blocks, so its
rank gets fewer of them. A rank may have several stages, alternating with the others (interleaved)
or there and back (zero-bubble's V: the first rank has the first stage and the last).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rapidformer.errors import ConfigurationError

FLAG = "--pipeline-model-parallel-size"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Blocks ``start`` to ``end`` (exclusive), with the modules before or after all of them."""

    index: int
    start: int
    end: int
    is_first: bool
    is_last: bool
    owner: int
    """The pipeline rank that runs it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All stages of a pipeline, in the order of the forward pass."""

    schedule: str
    stages: tuple[Stage, ...]
    num_processes: int

    def get_own(self, process: int) -> list[Stage]:
        return [stage for stage in self.stages if stage.owner == process]

    def find_owner(self, block: int) -> int:
        """The rank that has a block."""
        return next(s.owner for s in self.stages if s.start <= block < s.end)

    def describe(self) -> str:
        """The blocks of each rank as text, for the start-up summary."""
        parts = []
        for process in range(self.num_processes):
            ranges = (
                f"{s.start}-{s.end - 1}" if s.end - s.start > 1 else str(s.start)
                for s in self.get_own(process)
            )
            parts.append(" and ".join(ranges))
        return f"{self.schedule}, blocks {' | '.join(parts)}"


def build_layout(
    costs: Sequence[float],
    *,
    before: float,
    after: float,
    num_processes: int,
    schedule: str | None,
    layers_per_stage: int | None,
    model: str,
) -> Layout:
    """Cut the blocks, each with its cost, into stages; an error says what would work."""
    name = schedule or ("interleaved" if layers_per_stage else "1f1b")
    problems = list(_find_problems(len(costs), num_processes, name, layers_per_stage, model))
    if problems:
        raise ConfigurationError(problems)
    if layers_per_stage is not None:
        bounds = list(range(0, len(costs) + 1, layers_per_stage))
    else:
        per_process = 2 if name in ("interleaved", "zero-bubble") else 1
        bounds = balance(costs, per_process * num_processes, before=before, after=after)
    owners = list(range(num_processes)) * len(bounds)
    if name == "zero-bubble":  # there and back
        owners = [*range(num_processes), *reversed(range(num_processes))]
    last = len(costs)
    stages = tuple(
        Stage(index=i, start=start, end=end, is_first=i == 0, is_last=end == last, owner=owner)
        for i, ((start, end), owner) in enumerate(zip(pairwise(bounds), owners, strict=False))
    )
    return Layout(schedule=name, stages=stages, num_processes=num_processes)


def _find_problems(
    blocks: int, processes: int, name: str, layers: int | None, model: str
) -> Iterator[str]:
    given = f"{FLAG} {processes}"
    if blocks < processes:
        most = f"use {blocks} or fewer" if blocks > 1 else "remove the flag"
        yield (
            f"{given}: {model} has {blocks} block{'s' * (blocks != 1)}, and every rank needs "
            f"one: {most}. --zero-3-memory-optimization splits the blocks themselves."
        )
        return
    if name == "zero-bubble" and layers is not None:
        yield (
            f"{_VIRTUAL} {layers}: --pipeline-schedule zero-bubble always has two stages on each "
            "rank. Give only one of them."
        )
    elif name in ("1f1b", "gpipe") and layers is not None:
        yield (
            f"{_VIRTUAL} {layers} gives a rank several stages, which --pipeline-schedule {name} "
            "does not support: use --pipeline-schedule interleaved."
        )
    elif layers is not None and (blocks % (layers * processes) or blocks == layers * processes):
        fitting = [n for n in range(1, blocks) if blocks % (n * processes) == 0]
        fitting = [n for n in fitting if n * processes < blocks]
        choices = f"use {' or '.join(map(str, fitting))}" if fitting else "remove the flag"
        yield (
            f"{_VIRTUAL} {layers} x {given} does not divide the {blocks} blocks of {model} into "
            f"two or more equal stages per rank: {choices}."
        )
    elif name in ("interleaved", "zero-bubble") and layers is None and blocks < 2 * processes:
        yield (
            f"--pipeline-schedule {name} needs two stages on each of the {processes} ranks, "
            f"but {model} has only {blocks} blocks: use 1f1b."
        )


def balance(
    costs: Sequence[float], count: int, *, before: float = 0.0, after: float = 0.0
) -> list[int]:
    """Bounds of ``count`` stages that minimize the most expensive one; each has a block."""
    blocks = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def get_cost(start: int, end: int) -> float:
        extra = before * (start == 0) + after * (end == blocks)
        return sums[end] - sums[start] + extra

    # worst[k][end]: the most expensive of k stages over the first `end` blocks, and where the last
    # begins.
    worst: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for number in range(1, count + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(number, blocks - (count - number) + 1):
            earlier = ((start, cost) for start, (cost, _) in worst[-1].items() if start < end)
            row[end] = min((max(cost, get_cost(start, end)), start) for start, cost in earlier)
        worst.append(row)
    bounds = [blocks]
    for number in range(count, 0, -1):
        bounds.append(worst[number][bounds[-1]][1])
    return bounds[::-1]
