"""How near runs of several processes must come to one process, and whether they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rapidformer.verification.compare import compare
from rapidformer.verification.trace import Trace, compute_losses


@dataclass(frozen=True)
class Limits:
    """How far a run may be from the reference; at its first update, how far at most."""

    all: Mapping[str, float]
    first: Mapping[str, float]
    """Before round-off has gone through an update, less is allowed."""


ALL = {"loss": 1e-6, "gradient norm": 1e-5, "gradients": 1e-5, "updated weights": 1e-5}
"""The contract is 1e-5 of everything, over ten updates."""
FIRST = {"loss": 1e-6, "gradient norm": 1e-6, "gradients": 5e-6}
LIMITS = Limits(ALL, FIRST)
WHOLE_LIMITS = Limits(ALL, {**FIRST, "gradients": 2e-6})
"""Where every process computes whole layers. Sums over tokens depend on a micro-batch's rows."""
STAGE_LIMITS = Limits({**ALL, "gradient norm": 1e-6, "updated weights": 5e-6}, FIRST)
SHARD_LIMITS = Limits({**STAGE_LIMITS.all, "gradients": 5e-6}, FIRST)


def check_equal(
    reference: Trace, traces: list[Trace], limits: Limits = WHOLE_LIMITS, *, where: str = ""
) -> None:
    """Every process's view beside one process: all updates, and the first one more strictly."""
    comparison = compare(reference, traces, limits.all)
    assert comparison.is_equal, f"{where}: {comparison.describe_failures()}"
    first = compare(take_first(reference), [take_first(trace) for trace in traces], limits.first)
    assert first.is_equal, f"{where}, at the first update: {first.describe_failures()}"


def check_copies(traces: list[Trace]) -> None:
    """What several processes hold is the same on all of them, bit for bit.

    Not where layers are split: sums over processes round differently on each.
    """
    first: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for trace in traces:
        assert trace.norms == traces[0].norms
        for kind, tensors in (("gradient", trace.gradients[0]), ("weight", trace.weights)):
            for name, value in tensors.items():
                assert np.array_equal(first.setdefault((kind, name), value), value), (kind, name)
    for rank in {trace.place["data"] for trace in traces}:
        losses = [trace.losses for trace in traces if trace.place["data"] == rank]
        assert all(each == losses[0] for each in losses)


def take_first(trace: Trace) -> Trace:
    """The first update alone."""
    parts = {name: getattr(trace, name)[:1] for name in ("losses", "samples", "norms", "gradients")}
    return replace(trace, **parts, weights=trace.start)


def get_losses(*traces: Trace) -> list[float]:
    """The mean loss of every update; needs the trace of every data-parallel rank."""
    return compute_losses(list(traces))[0]


def get_bytes(trace: Trace) -> int:
    """Of the parameters, in this process."""
    return int(trace.facts["parameter_bytes"])


def get_gradient_names(traces: list[Trace]) -> set[str]:
    return {name for trace in traces for name in trace.gradients[0]}


def get_ties(traces: list[Trace]) -> set[tuple[str, ...]]:
    return {tuple(group) for trace in traces for group in trace.ties}
