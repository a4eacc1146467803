"""What makes an update wrong although its gradients are right: rate, decay, clipping, dropout.

Unlike gradients and weights, these show what is wrong by themselves, so each difference comes with
a sentence. They also show faults that are too small to see in the weights of a few updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from rapidformer.verification.difference import LIMIT, Difference, divide
from rapidformer.verification.trace import Step, Trace


def find_causes(reference: Trace, traces: list[Trace]) -> dict[str, list[Difference]]:
    """Every such quantity that both runs have recorded."""
    found = {
        "micro-batch weights": [*_compare_weights(traces), *_compare_totals(traces)],
        "clipping": list(_compare_clipping(reference, traces)),
        "learning rate": list(_compare_rates(reference, traces)),
        "weight decay": list(_compare_decays(reference, traces)),
        "dropout masks": list(_compare_draws(traces)),
    }
    return {name: differences for name, differences in found.items() if differences}


# ---- learning rate -------------------------------------------------------------------------------


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


# ---- weight decay --------------------------------------------------------------------------------


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


# ---- clipping ------------------------------------------------------------------------------------


def _compare_clipping(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    for process, trace in enumerate(traces):
        steps = zip(trace.steps, reference.steps, trace.norms, reference.norms, strict=False)
        for update, (mine, expected, norm, right) in enumerate(steps):
            if mine.clip_factor is None or not expected.clip_factor:
                continue
            value = abs(mine.clip_factor - expected.clip_factor) / expected.clip_factor
            if mine.max_norm is not None and expected.max_norm is not None:
                value = max(
                    value, divide(abs(mine.max_norm - expected.max_norm), expected.max_norm)
                )
            # Otherwise clipping by a wrong norm is a consequence, not a cause.
            is_cause = abs(norm - right) <= LIMIT * right
            yield Difference(
                value=value,
                update=update,
                process=process,
                summary=_summarize_clipping(mine, expected) if is_cause else "",
                cause=_describe_clipping(mine, expected, norm, update) if is_cause else "",
            )


def _summarize_clipping(mine: Step, expected: Step) -> str:
    is_left_out = mine.clip_factor == 1.0 != expected.clip_factor
    return "the gradient is not clipped" if is_left_out else "the gradient is clipped differently"


def _describe_clipping(mine: Step, expected: Step, norm: float, update: int) -> str:
    assert mine.clip_factor is not None and expected.clip_factor is not None
    cause = (
        f"the gradient of step {update + 1} has norm {norm:.3g} and reaches the optimizer with "
        f"{norm * mine.clip_factor:.3g}; one process clips it to {norm * expected.clip_factor:.3g}"
    )
    if mine.clip_factor == 1.0 != expected.clip_factor:
        return f"{cause}. Clipping is left out."
    if mine.max_norm != expected.max_norm:
        return (
            f"{cause}. The norm to clip to is {mine.max_norm:g} instead of {expected.max_norm:g}."
        )
    return f"{cause}. All ranks must clip by the norm of the whole gradient."


# ---- weights of micro-batches --------------------------------------------------------------------


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
            weights = [weight for t in members for weight, *_ in t.steps[update].micro_batches]
            total = sum(weights)
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
    """Whether every weight is 1 though the loader counted other numbers of labels.

    Only a wrong gradient makes that a fault: a script may give such weights, and be right.
    """
    each = [entry for trace in traces for step in trace.steps for entry in step.micro_batches]
    counts = {labels for _, labels, _ in each if labels}
    if len(counts) < 2 or any(weight not in (0.0, 1.0) for weight, *_ in each):
        return None
    return Difference(
        value=1.0 - min(counts) / max(counts),
        summary="all weigh the same",
        cause=f"every micro-batch has weight 1, but the loader counted {min(counts):g} to "
        f"{max(counts):g} labels in them: the gradient is a mean of means instead of the mean over "
        "all labels. If the script gives this weight itself, let it give the number of labels.",
    )


# ---- dropout -------------------------------------------------------------------------------------


def _compare_draws(traces: list[Trace]) -> Iterator[Difference]:
    """Replicas must draw different masks; ranks that share a layer must draw the same ones."""
    for (first, one), (second, other) in combinations(enumerate(traces), 2):
        axes = {axis for axis in one.place if one.place[axis] != other.place[axis]}
        pairs = list(zip(one.draws, other.draws, strict=False))
        if axes == {"data"} and pairs:
            is_wrong = any(mine == yours for mine, yours in pairs)
            yield Difference(
                value=float(is_wrong),
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
