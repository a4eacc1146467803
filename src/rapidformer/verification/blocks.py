"""Where the forward pass of a run begins to differ: the size of what each block hands on.

Gradients do not tell: once the loss is wrong, all of them are. Only runs that have the same
micro-batches can be compared so, since padding counts. What a reader would get wrong: a block's
output may be whole on every tensor-parallel process, or each may have its share of the tokens;
either is right.
"""

from __future__ import annotations

from rapidformer.verification.trace import Trace

_LIMIT = 1e-5


def find_first_block(alike: Trace, traces: list[Trace]) -> str | None:
    """The first block whose output differs from one process's, given the same micro-batches.

    Empty: none does, and the loss is computed wrongly from what the last one hands on. None where
    the outputs are not known.
    """
    known = [name for name in alike.blocks if any(name in trace.blocks for trace in traces)]
    for name in known:
        holders = [trace for trace in traces if name in trace.blocks]
        ranks = {trace.place["tensor"] for trace in holders}
        sums = [sum(t.blocks[name] for t in holders if t.place["tensor"] == r) for r in ranks]
        measure = max(abs(alike.blocks[name]), 1e-12) * _LIMIT
        is_whole = all(abs(total - alike.blocks[name]) <= measure for total in sums)
        if not is_whole and abs(sum(sums) - alike.blocks[name]) > measure:
            return name
    return "" if known else None
