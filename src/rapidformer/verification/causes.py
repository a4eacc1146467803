"""Differences, and what makes an update wrong although its gradients are right.

Unlike gradients and weights, rate, decay, clipping and dropout show what is wrong by themselves, so
each difference comes with a sentence; also faults too small to see in the weights of a few updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from rapidformer.verification.trace import Step, Trace

LIMIT = 1e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one number or tensor of a run is from the reference's."""

    value: float
    limit: float = LIMIT
    update: int | None = None
    name: str = ""
    process: int = 0
    cause: str = ""
    """A sentence that says what is wrong, where the quantity itself shows it."""
    summary: str = ""
    """The same in a few words, for the table."""

    @property
    def excess(self) -> float:
        """The difference as a multiple of the limit; NaN counts as the worst."""
        return math.inf if math.isnan(self.value) else self.value / self.limit

    @property
    def is_equal(self) -> bool:
        return self.excess <= 1.0

    def locate(self) -> str:
        parts = [self.name] if self.name else []
        parts += [f"step {self.update + 1}"] if self.update is not None else []
        place = ", ".join([*parts, f"rank {self.process}"])
        return place if self.is_equal or not self.summary else f"{place}: {self.summary}"


def divide(difference: float, size: float) -> float:
    """The difference relative to a size; infinite where something differs from nothing."""
    if not difference:
        return 0.0
    return difference / size if size else math.inf


def find_causes(reference: Trace, traces: list[Trace]) -> dict[str, list[Difference]]:
    """Every such quantity that both runs have recorded."""
    differences = {
        "micro-batch weights": [*_compare_weights(traces), *_compare_totals(traces)],
        "clipping": list(_compare_clipping(reference, traces)),
        "learning rate": list(_compare_rates(reference, traces)),
        "weight decay": list(_compare_decays(reference, traces)),
        "dropout masks": list(_compare_draws(traces)),
    }
    return {name: measured for name, measured in differences.items() if measured}


def _compare_rates(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    for process, trace in enumerate(traces):
        for update, (mine, expected) in enumerate(zip(trace.steps, reference.steps, strict=False)):
            names = [name for name in mine.rates if name in expected.rates]
            for name in names[:1] if mine.position != expected.position else names:
                yield _compare_rate(name, mine, expected, update, process)


def _compare_rate(name: str, mine: Step, expected: Step, update: int, process: int) -> Difference:
    rate, right = mine.rates[name], expected.rates[name]
    value = divide(abs(rate - right), max(abs(rate), abs(right)))
    cause = f"step {update + 1} has learning rate {rate:.3g} for {name}, in one process {right:.3g}"
    summary = "wrong learning rate"
    if mine.position is not None and expected.position is not None:
        ahead = mine.position - expected.position
        value = max(value, abs(ahead) / max(mine.position, expected.position, 1))
        if ahead:
            word = "too far" if ahead > 0 else "not far enough"
            summary = f"the schedule has advanced {word}"
            cause += (
                f": before it the schedule has advanced {mine.position} times instead of "
                f"{expected.position}. It must advance once per optimizer step, not once per "
                "micro-batch or process"
            )
    return Difference(
        value=value, update=update, process=process, cause=f"{cause}.", summary=summary
    )


def _compare_decays(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    for process, trace in enumerate(traces):
        shared = [name for name in trace.decays if name in reference.decays]
        wrong = [name for name in shared if trace.decays[name] != reference.decays[name]]
        for name in shared:
            mine, expected = trace.decays[name], reference.decays[name]
            others = f"; {len(wrong) - 1} other parameters differ too" if len(wrong) > 1 else ""
            yield Difference(
                value=divide(abs(mine - expected), max(abs(mine), abs(expected))),
                name=name,
                process=process,
                summary=f"decays by {mine:g} instead of {expected:g}",
                cause=f"{name} has weight decay {mine:g}, in one process {expected:g}{others}. "
                "Norms and biases must not decay where they do not in one process.",
            )


def _compare_clipping(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    for process, trace in enumerate(traces):
        steps = zip(trace.steps, reference.steps, trace.norms, reference.norms, strict=False)
        for update, (mine, expected, norm, right) in enumerate(steps):
            if mine.clip_factor is None or not expected.clip_factor:
                continue
            value = abs(mine.clip_factor - expected.clip_factor) / expected.clip_factor
            if mine.max_norm is not None and expected.max_norm is not None:
                change = abs(mine.max_norm - expected.max_norm)
                value = max(value, divide(change, expected.max_norm))
            # Otherwise clipping by a wrong norm is a consequence, not a cause.
            is_cause = abs(norm - right) <= LIMIT * right
            text = _describe_clipping(mine, expected, norm, update) if is_cause else ("", "")
            yield Difference(
                value=value, update=update, process=process, summary=text[0], cause=text[1]
            )


def _describe_clipping(mine: Step, expected: Step, norm: float, update: int) -> tuple[str, str]:
    assert mine.clip_factor is not None and expected.clip_factor is not None
    cause = (
        f"the gradient of step {update + 1} has norm {norm:.3g} and reaches the optimizer with "
        f"{norm * mine.clip_factor:.3g}; one process clips it to {norm * expected.clip_factor:.3g}"
    )
    if mine.clip_factor == 1.0 != expected.clip_factor:
        return "the gradient is not clipped", f"{cause}. Clipping is left out."
    why = "All ranks must clip by the norm of the whole gradient"
    if mine.max_norm != expected.max_norm:
        why = f"The norm to clip to is {mine.max_norm:g} instead of {expected.max_norm:g}"
    return "the gradient is clipped differently", f"{cause}. {why}."


def _compare_weights(traces: list[Trace]) -> Iterator[Difference]:
    """What the engine counted, compared with what the loader counted."""
    for process, trace in enumerate(traces):
        for update, step in enumerate(trace.steps):
            for weight, labels, is_given in step.micro_batches:
                if is_given or labels is None:
                    continue
                yield Difference(
                    value=divide(abs(weight - labels), max(weight, labels)),
                    update=update,
                    process=process,
                    summary="not weighted by their labels",
                    cause=f"a micro-batch of step {update + 1} has weight {weight:g}, but the "
                    f"loader counted {labels:g} labels in it: the gradient is a mean of means "
                    "instead of the mean over all labels.",
                )


def _compare_totals(traces: list[Trace]) -> Iterator[Difference]:
    """What gradients were divided by, compared with the sum of the weights."""
    for process, trace in enumerate(traces):
        axes = ("tensor", "pipeline")
        members = [t for t in traces if all(t.place[axis] == trace.place[axis] for axis in axes)]
        for update, step in enumerate(trace.steps):
            total = sum(weight for t in members for weight, *_ in t.steps[update].micro_batches)
            if not total:
                continue
            yield Difference(
                value=abs(step.total_weight - total) / total,
                update=update,
                process=process,
                summary="not weighted by their labels",
                cause=f"the micro-batches of step {update + 1} weigh {total:g} together, but "
                f"the gradient was divided by {step.total_weight:g}: it is a mean of means instead "
                "of the mean over all labels.",
            )


def find_equal_weights(traces: list[Trace]) -> Difference | None:
    """Whether every weight is 1 despite the loader's counts: a fault if gradients are wrong."""
    entries = [entry for trace in traces for step in trace.steps for entry in step.micro_batches]
    counts = {labels for _, labels, _ in entries if labels}
    if len(counts) < 2 or any(weight not in (0.0, 1.0) for weight, *_ in entries):
        return None
    return Difference(
        value=1.0 - min(counts) / max(counts),
        summary="all weigh the same",
        cause=f"every micro-batch has weight 1, but the loader counted {min(counts):g} to "
        f"{max(counts):g} labels in them: the gradient is a mean of means instead of the mean over "
        "all labels. If the script gives this weight itself, let it give the number of labels.",
    )


def _compare_draws(traces: list[Trace]) -> Iterator[Difference]:
    """Replicas must draw different masks; ranks that share a layer must draw the same ones."""
    for (first, one), (second, other) in combinations(enumerate(traces), 2):
        axes = {axis for axis in one.place if one.place[axis] != other.place[axis]}
        pairs = list(zip(one.draws, other.draws, strict=False))
        if axes == {"data"} and pairs:
            yield Difference(
                value=float(any(mine == yours for mine, yours in pairs)),
                process=second,
                summary=f"the same masks as rank {first}",
                cause=f"ranks {first} and {second} are data-parallel replicas, but draw the "
                "same dropout masks: each replica needs its own seed.",
            )
        elif axes == {"tensor"} and pairs:
            yield Difference(
                value=float(pairs[0][0] != pairs[0][1]),
                process=second,
                summary=f"other masks than rank {first}",
                cause=f"ranks {first} and {second} share layers by tensor parallelism, but "
                "draw different dropout masks: they must draw from the same seed.",
            )
