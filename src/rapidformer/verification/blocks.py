"""Where the forward pass of a run begins to differ: the size of what each block hands on.

Gradients do not tell: once the loss is wrong, all of them are. Only runs that have the same
micro-batches can be compared so, since padding counts. What a reader would get wrong: a block's
output may be whole on every tensor- or context-parallel process, or each may have its share of the
tokens; either is right.
"""

from __future__ import annotations

from rapidformer.verification.trace import Trace

_LIMIT = 1e-5
# Along which axes every process may have the whole output; over all others it is added up.
_WHOLE_ALONG = ((), ("tensor",), ("context",), ("context", "tensor"))


def find_first_block(alike: Trace, traces: list[Trace]) -> str | None:
    """The first block whose output differs from one process's, given the same micro-batches.

    Empty: none does, and the loss is computed wrongly from what the last one hands on. None where
    the outputs are not known.
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
