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

from rapidformer.verification.blocks import find_first_block
from rapidformer.verification.causes import find_causes
from rapidformer.verification.difference import LIMIT, Difference, divide
from rapidformer.verification.trace import Tensors, Trace, compute_losses, count_samples

QUANTITIES = (
    "starting weights", "loss", "micro-batch weights", "gradient norm", "gradients", "clipping",
    "learning rate", "weight decay", "updated weights", "dropout masks",
)  # fmt: skip
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


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One line of the table."""

    name: str
    worst: Difference

    @property
    def is_equal(self) -> bool:
        return self.worst.is_equal


@dataclass(kw_only=True)
class Comparison:
    """The result of comparing a run with its reference."""

    quantities: dict[str, Quantity]
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
        return not self.problems and all(q.is_equal for q in self.quantities.values())

    @property
    def is_small(self) -> bool:
        """Whether all differences are small enough to be round-off."""
        worst = [q.worst for q in self.quantities.values() if not q.is_equal]
        return not self.problems and all(d.value <= _MOST_ROUND_OFF for d in worst)

    def set_quantity(self, name: str, worst: Difference) -> None:
        """Replace a line of the table, by what other runs have shown."""
        self.quantities[name] = Quantity(name=name, worst=worst)

    @property
    def causes(self) -> list[str]:
        """A sentence for each quantity that differs and shows by itself what is wrong."""
        worst = [q.worst for q in self.quantities.values() if not q.is_equal]
        return [d.cause for d in worst if d.cause]

    def describe_failures(self) -> str:
        """Every quantity that differs and where, for a test's message."""
        lines = [
            f"{q.name}: {q.worst.value:.1e} ({q.worst.locate()})"
            for q in self.quantities.values()
            if not q.is_equal
        ]
        return "; ".join([*self.problems, *lines])


def compare(
    reference: Trace,
    traces: list[Trace],
    limits: Mapping[str, float] | None = None,
    noise: Trace | None = None,
    alike: Trace | None = None,
) -> Comparison:
    """Compare the traces of a run's ranks with that of one process.

    ``noise`` and ``alike`` are further runs of one process that help to judge a difference: one
    from weights changed by round-off, and one with the run's own micro-batches.
    """
    updates = {len(trace.gradients) for trace in traces}
    if updates != {len(reference.gradients)}:
        counts = ", ".join(str(n) for n in sorted(updates))
        return Comparison(
            quantities={},
            problems=[f"one process did {len(reference.gradients)} steps, the run did {counts}"],
        )
    found = _find_differences(reference, traces)
    floors = {} if noise is None else _find_differences(reference, [noise])
    given = dict.fromkeys(QUANTITIES, LIMIT) | dict(limits or {})
    for name, differences in found.items():
        allowed = _get_allowance(floors.get(name, []))
        found[name] = [
            replace(d, limit=max(given[name], allowed.get((d.update, d.name), 0.0)))
            for d in differences
        ]
    worst = {
        name: max(differences, key=lambda d: d.excess, default=Difference(value=0.0))
        for name, differences in found.items()
    }
    gradients = [d for d in found["gradients"] if not d.is_equal]
    weights = [d for d in found["updated weights"] if not d.is_equal]
    is_forward_equal = all(d.is_equal for d in found["loss"] if d.update == 0)
    block = None if alike is None else find_first_block(alike, traces)
    if is_forward_equal:
        # A wrong output may contribute too little to the loss to show there.
        block = block or None
        is_forward_equal = block is None
    suspects = _find_suspects(reference, traces, block)
    first = _find_first(gradients or weights, suspects, is_forward_equal)
    same_update = [
        d for d in gradients or weights if first is not None and d.update == first.update
    ]
    return Comparison(
        quantities={
            name: Quantity(name=name, worst=worst[name]) for name in QUANTITIES if name in worst
        },
        problems=[*_find_missing(reference, traces), *_find_broken_ties(reference, traces)],
        first=first,
        block=block,
        differing=len({d.name for d in same_update}),
        parameters=len(reference.start),
        has_same_samples=count_samples([reference]) == count_samples(traces),
    )


def _find_differences(reference: Trace, traces: list[Trace]) -> dict[str, list[Difference]]:
    return {
        "starting weights": list(_compare_weights(reference, traces, "start")),
        "loss": list(_compare_losses(reference, traces)),
        "gradient norm": list(_compare_norms(reference, traces)),
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
    """The parameters where the forward pass went wrong; all of them if that is not known.

    The split ones, if there are any: unsplit ones are computed as in one process.
    """
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


def _compare_losses(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    expected = compute_losses([reference])[0]
    for process, losses in enumerate(compute_losses(traces)):
        for update, (mine, loss) in enumerate(zip(losses, expected, strict=True)):
            value = abs(mine - loss) / max(abs(loss), 1e-12)
            yield Difference(value=value, update=update, process=process)


def _compare_norms(reference: Trace, traces: list[Trace]) -> Iterator[Difference]:
    for process, trace in enumerate(traces):
        for update, (mine, norm) in enumerate(zip(trace.norms, reference.norms, strict=True)):
            value = abs(mine - norm) / max(abs(norm), 1e-12)
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
                value = divide(difference, _get_measure(size, norm, update))
                yield Difference(value=value, update=update, name=name, process=process)


def _get_measure(size: float, norm: float, update: int) -> float:
    """The size that a gradient's difference is relative to."""
    if update:
        return max(size, _LATER_ROUND_OFF * norm)
    return size if size > _FLOOR * norm else _ROUND_OFF * norm


def _compare_weights(reference: Trace, traces: list[Trace], which: str) -> Iterator[Difference]:
    expected: Tensors = getattr(reference, which)
    resting = _find_resting(reference)
    for process, trace in enumerate(traces):
        weights: Tensors = getattr(trace, which)
        for name in [name for name in weights if name in expected]:
            difference = _get_difference(weights[name], expected[name])
            smallest = _MOVED_BY_ROUND_OFF if name in resting else _SMALLEST_WEIGHT
            smallest *= math.sqrt(expected[name].size)
            size = max(_get_norm(expected[name]), smallest, 1e-12)
            yield Difference(value=difference / size, name=name, process=process)


def _find_resting(reference: Trace) -> set[str]:
    """The weights whose first gradient is zero in theory."""
    gradients = reference.gradients[0] if reference.gradients else {}
    norm = _get_whole_norm(reference, gradients)
    return {name for name, g in gradients.items() if _get_norm(g) <= _FLOOR * norm}


def _get_whole_norm(trace: Trace, tensors: Tensors) -> float:
    return math.sqrt(sum(_get_norm(t) ** 2 for t in _drop_ties(trace, tensors).values()))


def _drop_ties(trace: Trace, tensors: Tensors) -> Tensors:
    """Each parameter once."""
    doubles = {name for group in trace.ties for name in group[1:]}
    return {name: value for name, value in tensors.items() if name not in doubles}


def _get_norm(tensor: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(tensor.astype(np.float64, copy=False).reshape(-1)))


def _get_difference(mine: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return _get_norm(mine - expected) if mine.shape == expected.shape else math.inf


def _find_missing(reference: Trace, traces: list[Trace]) -> Iterator[str]:
    held: set[str] = set().union(*(trace.start for trace in traces))
    missing = [name for name in reference.start if name not in held]
    if missing:
        yield f"no rank has {_list(missing)}"
    unknown = [name for name in held if name not in reference.start]
    if unknown:
        yield f"one process does not have {_list(sorted(unknown))}"


def _find_broken_ties(reference: Trace, traces: list[Trace]) -> Iterator[str]:
    broken = set()
    for trace in traces:
        mine = {tuple(group) for group in trace.ties}
        for group in reference.ties:
            here = tuple(name for name in group if name in trace.start)
            if len(here) > 1 and here not in mine:
                broken.add(" and ".join(here))
    yield from (f"{names} are no longer one parameter" for names in sorted(broken))


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
