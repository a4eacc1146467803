"""Compare two runs of the same updates: loss, gradient norm, every gradient, every weight.

A gradient that is zero in theory (a key's bias, say) is pure round-off in any run: a first gradient
below a millionth of the total norm need not match, but must stay that small. Where the gradients of
many rows cancel, round-off is a large part of what remains. How large is measured by a run of one
process from weights that differ in their last bits (``noise``); a switch cannot be expected to do
better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rapidformer.errors import list_some
from rapidformer.verification.causes import LIMIT, Difference, divide, find_causes
from rapidformer.verification.trace import Tensors, Trace, compute_losses, count_samples

QUANTITIES = (
    "starting weights", "loss", "micro-batch weights", "gradient norm", "gradients", "clipping",
    "learning rate", "weight decay", "updated weights", "dropout masks",
)  # fmt: skip
_HEADINGS = ("quantity", "worst difference", "limit", "", "where")
# A first gradient below this fraction of the norm is zero in theory, and is checked against the
# second fraction instead.
_FLOOR, _ROUND_OFF = 1e-6, 1e-2
# After an update has carried round-off along, no gradient's limit is below this fraction.
_LATER_ROUND_OFF = 1e-1
# Every operation rounds, not only the weights; but a real error must never pass as round-off.
_MORE_ROUND_OFF, _MOST_ROUND_OFF = 30.0, 1e-2
# Biases that start at zero have no meaningful size yet, so weights are compared relative to the
# others' size. A weight whose gradient is zero in theory is moved by round-off alone, which Adam
# turns into full steps.
_SMALLEST_WEIGHT, _MOVED_BY_ROUND_OFF = 1e-2, 1.0
# Axes along which every rank may have a block's whole output; over all others it is summed. On
# tensor- or context-parallel ranks it may also be split by tokens.
_WHOLE_ALONG = ((), ("tensor",), ("context",), ("context", "tensor"))


@dataclass(kw_only=True)
class Comparison:
    """The result of comparing a run with its reference."""

    quantities: dict[str, Difference]
    """The worst difference of each."""
    problems: list[str] = field(default_factory=list)
    """Problems that are not numbers: a parameter that no rank has, weights no longer tied."""
    first: Difference | None = None
    """The gradient (else the weight) that differs first, and is thus nearest to the cause."""
    block: str | None = None
    """The block whose output differs first; empty: none, only the loss; None: not known."""
    differing: int = 0
    """How many names differ in that update."""
    parameters: int = 0
    has_same_samples: bool = True

    @property
    def is_equal(self) -> bool:
        return not self.problems and not self._failures

    @property
    def is_small(self) -> bool:
        """Whether all differences are small enough to be round-off."""
        is_round_off = all(d.value <= _MOST_ROUND_OFF for d in self._failures.values())
        return not self.problems and is_round_off

    @property
    def causes(self) -> list[str]:
        """A sentence for each quantity that differs and shows by itself what is wrong."""
        return [d.cause for d in self._failures.values() if d.cause]

    @property
    def _failures(self) -> dict[str, Difference]:
        return {name: worst for name, worst in self.quantities.items() if not worst.is_equal}

    def describe_failures(self) -> str:
        """Every quantity that differs and where, for a test's message."""
        lines = [f"{name}: {d.value:.1e} ({d.locate()})" for name, d in self._failures.items()]
        return "; ".join([*self.problems, *lines])


def compare(
    reference: Trace,
    traces: list[Trace],
    limits: Mapping[str, float] | None = None,
    noise: Trace | None = None,
    alike: Trace | None = None,
) -> Comparison:
    """Compare a run's traces with one process's; ``noise`` and ``alike`` help to judge them."""
    updates = {len(trace.gradients) for trace in traces}
    if updates != {len(reference.gradients)}:
        counts = ", ".join(str(n) for n in sorted(updates))
        problem = f"one process did {len(reference.gradients)} steps, the run did {counts}"
        return Comparison(quantities={}, problems=[problem])
    differences = _find_differences(reference, traces)
    floors = {} if noise is None else _find_differences(reference, [noise])
    for name, measured in differences.items():
        limit, allowed = (limits or {}).get(name, LIMIT), _get_allowance(floors.get(name, []))
        differences[name] = [
            replace(d, limit=max(limit, allowed.get((d.update, d.name), 0.0))) for d in measured
        ]
    gradients = [d for d in differences["gradients"] if not d.is_equal]
    weights = [d for d in differences["updated weights"] if not d.is_equal]
    is_forward_equal = all(d.is_equal for d in differences["loss"] if d.update == 0)
    block = None if alike is None else find_first_block(alike, traces)
    if is_forward_equal:
        # A wrong output may contribute too little to the loss to show there.
        block = block or None
        is_forward_equal = block is None
    suspects = _find_suspects(reference, traces, block)
    first = _find_first(gradients or weights, suspects, is_forward_equal)
    return Comparison(
        quantities={
            name: max(differences[name], key=lambda d: d.excess, default=Difference(value=0.0))
            for name in QUANTITIES
            if name in differences
        },
        problems=[*_find_missing(reference, traces), *_find_broken_ties(reference, traces)],
        first=first,
        block=block,
        differing=len({d.name for d in gradients or weights if first and d.update == first.update}),
        parameters=len(reference.start),
        has_same_samples=count_samples([reference]) == count_samples(traces),
    )


def _find_differences(reference: Trace, traces: list[Trace]) -> dict[str, list[Difference]]:
    return {
        "starting weights": list(_compare_weights(reference, traces, "start")),
        "loss": list(_compare_numbers(compute_losses([reference])[0], compute_losses(traces))),
        "gradient norm": list(_compare_numbers(reference.norms, [t.norms for t in traces])),
        "gradients": list(_compare_gradients(reference, traces)),
        "updated weights": list(_compare_weights(reference, traces, "weights")),
        **find_causes(reference, traces),
    }


def _get_allowance(floors: list[Difference]) -> dict[tuple[int | None, str], float]:
    """The difference that round-off explains, per tensor; a single number may escape by chance."""
    largest = max((d.value for d in floors if not d.name), default=0.0)
    return {
        (d.update, d.name): min(_MORE_ROUND_OFF * (d.value if d.name else largest), _MOST_ROUND_OFF)
        for d in floors
    }


def _find_suspects(reference: Trace, traces: list[Trace], block: str | None) -> list[str]:
    """Where the forward pass went wrong: the split parameters there, if any; all if not known."""
    names = list(reference.start)
    if block is None:
        return names
    blocks = tuple(f"{name}." for trace in traces for name in trace.blocks)
    if block:
        names = [name for name in names if name.startswith(f"{block}.")]
    else:
        names = [name for name in names if not name.startswith(blocks)]
    split = {name for trace in traces for name in trace.split}
    return [name for name in names if name in split] or names


def _find_first(
    differences: list[Difference], suspects: list[str], is_forward_equal: bool
) -> Difference | None:
    """The earliest update that differs; in it, the parameter nearest to the cause.

    If the loss is right, a wrong gradient also spoils those before it in the model, so the cause is
    at the last one. If the loss is already wrong, all are, and the worst says the most.
    """
    earliest = min((d.update or 0 for d in differences), default=0)
    candidates = [d for d in differences if (d.update or 0) == earliest]
    places = {name: place for place, name in enumerate(suspects)}
    candidates = [d for d in candidates if d.name in places] or candidates
    if is_forward_equal:
        return max(candidates, key=lambda d: (places.get(d.name, -1), d.excess), default=None)
    return max(candidates, key=lambda d: (d.excess, places.get(d.name, -1)), default=None)


def _compare_numbers(expected: list[float], processes: list[list[float]]) -> Iterator[Difference]:
    """One number per update, as each process has it."""
    for process, numbers in enumerate(processes):
        for update, (mine, right) in enumerate(zip(numbers, expected, strict=True)):
            value = abs(mine - right) / max(abs(right), 1e-12)
            yield Difference(value=value, update=update, process=process)


def _compare_gradients(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    for update, expected in enumerate(reference.gradients):
        norm = _get_whole_norm(reference, expected)
        for process, trace in enumerate(traces):
            mine = trace.gradients[update]
            for name in [name for name in trace.start if name in expected or name in mine]:
                # A parameter without a gradient counts as one whose gradient is zero.
                a, b = mine.get(name), expected.get(name)
                size = 0.0 if b is None else _get_norm(b)
                if a is None or b is None:
                    difference = size if a is None else _get_norm(a)
                else:
                    difference = _get_difference(a, b)
                if update:
                    size = max(size, _LATER_ROUND_OFF * norm)
                elif size <= _FLOOR * norm:
                    size = _ROUND_OFF * norm
                value = divide(difference, size)
                yield Difference(value=value, update=update, name=name, process=process)


def _compare_weights(reference: Trace, traces: list[Trace], which: str) -> Iterator[Difference]:
    expected: Tensors = getattr(reference, which)
    gradients = reference.gradients[0] if reference.gradients else {}
    norm = _get_whole_norm(reference, gradients)
    # Those whose first gradient is zero in theory.
    resting = {name for name, g in gradients.items() if _get_norm(g) <= _FLOOR * norm}
    for process, trace in enumerate(traces):
        weights: Tensors = getattr(trace, which)
        for name in [name for name in weights if name in expected]:
            difference = _get_difference(weights[name], expected[name])
            smallest = _MOVED_BY_ROUND_OFF if name in resting else _SMALLEST_WEIGHT
            smallest *= math.sqrt(expected[name].size)
            size = max(_get_norm(expected[name]), smallest, 1e-12)
            yield Difference(value=difference / size, name=name, process=process)


def _get_whole_norm(trace: Trace, tensors: Tensors) -> float:
    """The norm of all tensors together, each parameter once."""
    doubles = {name for group in trace.ties for name in group[1:]}
    return math.sqrt(sum(_get_norm(t) ** 2 for name, t in tensors.items() if name not in doubles))


def _get_norm(tensor: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64, copy=False).reshape(-1)))


def _get_difference(mine: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return _get_norm(mine - expected) if mine.shape == expected.shape else math.inf


def find_first_block(alike: Trace, traces: list[Trace]) -> str | None:
    """The first block whose output differs from one process's, given the same micro-batches.

    Gradients do not show it: once the loss is wrong, all of them are. Micro-batches must be the
    same, since padding counts. Empty: none differs, so the loss is computed wrongly from the last
    block's output. None: the outputs are not known.
    """
    known = [name for name in alike.blocks if any(name in trace.blocks for trace in traces)]
    for name in known:
        holders = [trace for trace in traces if name in trace.blocks]
        if not any(_has_output(alike.blocks[name], name, holders, axes) for axes in _WHOLE_ALONG):
            return name
    return "" if known else None


def _has_output(expected: float, name: str, holders: list[Trace], axes: tuple[str, ...]) -> bool:
    sums: dict[tuple[int, ...], float] = {}
    for trace in holders:
        place = tuple(trace.place[axis] for axis in axes)
        sums[place] = sums.get(place, 0.0) + trace.blocks[name]
    measure = max(abs(expected), 1e-12) * LIMIT
    return all(abs(total - expected) <= measure for total in sums.values())


def _find_missing(reference: Trace, traces: list[Trace]) -> Iterator[str]:
    held: set[str] = set().union(*(trace.start for trace in traces))
    missing = [name for name in reference.start if name not in held]
    if missing:
        yield f"no rank has {list_some(missing, 4)}"
    unknown = [name for name in held if name not in reference.start]
    if unknown:
        yield f"one process does not have {list_some(sorted(unknown), 4)}"


def _find_broken_ties(reference: Trace, traces: list[Trace]) -> Iterator[str]:
    broken = set()
    for trace in traces:
        mine = {tuple(group) for group in trace.ties}
        for group in reference.ties:
            here = tuple(name for name in group if name in trace.start)
            if len(here) > 1 and here not in mine:
                broken.add(" and ".join(here))
    yield from (f"{names} are no longer one parameter" for names in sorted(broken))


def format_table(comparison: Comparison) -> list[str]:
    """One line per quantity: the worst relative difference, its limit, and where it occurred."""
    rows = [_HEADINGS]
    for name, worst in comparison.quantities.items():
        value, where = (f"{worst.value:.1e}", worst.locate()) if worst.value else ("0", "")
        verdict = "pass" if worst.is_equal else "FAIL"
        rows.append((name, value, f"{worst.limit:.0e}", verdict, where))
    rows += [("parameters", "", "", "FAIL", problem) for problem in comparison.problems]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    padded = [[cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)] for row in rows]
    return ["  ".join(cells).rstrip() for cells in padded]


def describe_cause(comparison: Comparison) -> list[str]:
    """What is wrong, in sentences; then the parameter that differs first, if that says more."""
    first = comparison.first
    if comparison.causes and (first is None or first.update != 0):
        return comparison.causes
    return [*comparison.causes, describe_first(comparison)]


def describe_first(comparison: Comparison) -> str:
    """The parameter nearest to the cause, and by how much it differs."""
    first = comparison.first
    if first is None:
        return ""
    where = {None: "", "": "the outputs of all blocks are right, the loss is not; "}
    begins = where.get(comparison.block, f"the forward pass differs from {comparison.block} on; ")
    what = "weight" if first.update is None else "gradient"
    others = comparison.differing - 1
    more = f"; so do {others} of the other {comparison.parameters - 1}" if others else ", alone"
    return (
        f"{begins}first parameter that differs: {first.name}, its {what} by {first.value:.1e} "
        f"({'' if first.update is None else f'step {first.update + 1}, '}"
        f"rank {first.process}){more}"
    )
