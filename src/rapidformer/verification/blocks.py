"""Find where a run's forward pass begins to differ, by the size of each block's output.

Gradients do not show it: once the loss is wrong, all of them are. Only runs with the same
micro-batches can be compared this way, since padding counts. On tensor- or context-parallel ranks a
block's output may be whole on each rank or split by tokens; both are correct.
"""

from __future__ import annotations

from rapidformer.verification.trace import Trace

_LIMIT = 1e-5
# Axes along which every rank may have the whole output; over all others it is summed.
_WHOLE_ALONG = ((), ("tensor",), ("context",), ("context", "tensor"))


def find_first_block(alike: Trace, traces: list[Trace]) -> str | None:
    """The first block whose output differs from one process's, given the same micro-batches.

    Empty: none differs, so the loss is computed wrongly from the last block's output. None: the
    outputs are not known.
    """
    known = [name for name in alike.blocks if any(name in trace.blocks for trace in traces)]
    for name in known:
        holders = [trace for trace in traces if name in trace.blocks]
        if not any(_is_equal(alike.blocks[name], name, holders, axes) for axes in _WHOLE_ALONG):
            return name
    return "" if known else None


def _is_equal(expected: float, name: str, holders: list[Trace], axes: tuple[str, ...]) -> bool:
    sums: dict[tuple[int, ...], float] = {}
    for trace in holders:
        place = tuple(trace.place[axis] for axis in axes)
        sums[place] = sums.get(place, 0.0) + trace.blocks[name]
    measure = max(abs(expected), 1e-12) * _LIMIT
    return all(abs(total - expected) <= measure for total in sums.values())
