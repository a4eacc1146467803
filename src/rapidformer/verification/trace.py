"""A trace of a few updates on one rank: everything that a switch could have changed.

Tensors are whole (not shards), in fp32, in host memory, under every name they have in the model: a
tied weight is stored under each of its names. A pipeline rank has only some of the names;
``compare`` looks at the traces of all ranks together. No torch here: the command compares without
it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Tensors = dict[str, "np.ndarray[Any, Any]"]
AXES = ("pipeline", "data", "context", "tensor")
_IN_ARRAYS = ("start", "gradients", "weights")


class MicroBatchWeight(NamedTuple):
    """How much a micro-batch counts in its update."""

    weight: float
    labels: int | None
    """As the loader counted them; None where it did not."""
    is_given: bool
    """Whether the script gave the weight."""


@dataclass(kw_only=True)
class Step:
    """What one optimizer step is made with besides the gradient."""

    micro_batches: list[MicroBatchWeight] = field(default_factory=list)
    total_weight: float = 0.0
    """What the sum of all micro-batches' gradients was divided by."""
    max_norm: float | None = None
    """The norm to clip to, as the run has it; None: the engine did not clip."""
    clip_factor: float | None = None
    """What clipping multiplied the gradient by."""
    rates: dict[str, float] = field(default_factory=dict)
    """The learning rate of every parameter."""
    position: int | None = None
    """How often the schedule had advanced."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Step:
        weights = [MicroBatchWeight(*entry) for entry in values.pop("micro_batches")]
        return cls(micro_batches=weights, **values)


@dataclass(kw_only=True)
class Trace:
    """The updates of one rank."""

    place: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 0))
    """The rank's position along each axis of the run."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Per update: the sums of mean loss x weight and of weights, over its own micro-batches."""
    samples: list[tuple[int, int]] = field(default_factory=list)
    """Per update: rows and labels of its own micro-batches."""
    norms: list[float] = field(default_factory=list)
    """Per update: the norm of the whole gradient, before clipping."""
    start: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    """Per update: after synchronization and division, before clipping."""
    weights: Tensors = field(default_factory=dict)
    """After the last update."""
    ties: Sequence[Sequence[str]] = ()
    """Groups of names that are one parameter."""
    split: list[str] = field(default_factory=list)
    """Names of parameters that this rank holds only a slice of."""
    blocks: dict[str, float] = field(default_factory=dict)
    """In the first update: the sum of squares of each block's output."""
    steps: list[Step] = field(default_factory=list)
    """Per update; a bare loop's trace has none."""
    decays: dict[str, float] = field(default_factory=dict)
    """The weight decay of every parameter."""
    draws: list[list[float]] = field(default_factory=list)
    """Random numbers that dropout would use: after ``compose``, and after the first update."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For the report: the model's class, its switches, ..."""

    def save(self, path: Path) -> None:
        """Write one file; ``load`` reads it back."""
        arrays = {f"start/{name}": value for name, value in self.start.items()}
        arrays |= {f"weights/{name}": value for name, value in self.weights.items()}
        for update, gradients in enumerate(self.gradients):
            arrays |= {f"gradients/{update}/{name}": g for name, g in gradients.items()}
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _IN_ARRAYS}
        head |= {"gradients": len(self.gradients), "steps": [asdict(step) for step in self.steps]}
        text = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)
        with path.open("wb") as file:
            np.savez(file, head=text, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what ``save`` wrote; tensors keep the order they had in the model."""
        with np.load(path, allow_pickle=False) as arrays:
            head = json.loads(arrays["head"].tobytes())
            for name in ("losses", "samples"):
                head[name] = [tuple(pair) for pair in head[name]]
            head["gradients"] = [{} for _ in range(head["gradients"])]
            head["steps"] = [Step.from_json(values) for values in head["steps"]]
            trace = cls(**head)
            for key in arrays.files:
                kind, _, name = key.partition("/")
                if kind == "gradients":
                    update, _, name = name.partition("/")
                    trace.gradients[int(update)][name] = arrays[key]
                elif kind in _IN_ARRAYS:
                    getattr(trace, kind)[name] = arrays[key]
        return trace


def compute_losses(traces: list[Trace]) -> list[list[float]]:
    """The mean loss of every update over its global batch, as each tensor-parallel rank has it."""
    views = []
    for rank in sorted({trace.place["tensor"] for trace in traces}):
        members = [trace for trace in traces if trace.place["tensor"] == rank]
        updates = zip(*(trace.losses for trace in members), strict=True)
        sums = [tuple(map(sum, zip(*parts, strict=True))) for parts in updates]
        views.append([total / weight if weight else math.nan for total, weight in sums])
    return views


def count_samples(traces: list[Trace]) -> list[tuple[int, int]]:
    """Rows and labels of every update; only data-parallel ranks see different rows."""
    members = {trace.place["data"]: trace for trace in reversed(traces)}
    # One rank per data-parallel rank: the first along every other axis.
    updates = zip(*(trace.samples for trace in members.values()), strict=True)
    return [(sum(r for r, _ in parts), sum(n for _, n in parts)) for parts in updates]


def count_parameters(traces: list[Trace]) -> int:
    """The number of parameters in the whole model, over all stages; a tied weight counts once."""
    # Tied as in the whole model: the names may be on two different stages.
    tied = [group for trace in traces for group in trace.facts.get("tied", trace.ties)]
    doubles = {name for group in tied for name in group[1:]}
    sizes = {name: value.size for trace in traces for name, value in trace.start.items()}
    return sum(size for name, size in sizes.items() if name not in doubles)
