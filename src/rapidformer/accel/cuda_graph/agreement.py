"""What the ranks of a run agree on before an update: how large its batches are, and whether graphs
are used at all.

Each rank replays graphs of its own, and gradients are exchanged outside of them, so ranks would not
wait for each other for ever if they differed. But one that records while the others replay delays
them all. With the sizes of the global update, all of them record at the same time, once per size.
"""

from __future__ import annotations

from collections.abc import Iterable

from rapidformer.accel.unpad.rows import NO_SIZES, Sizes
from rapidformer.dist.collectives import gather_objects, max_over_replicas
from rapidformer.dist.topology import Topology


def agree(
    topology: Topology, problem: str | None, sizes: Iterable[Sizes]
) -> tuple[str | None, Sizes]:
    """The first problem of any rank, and the largest sizes; on the host, once per update."""
    own = map(max, zip(*sizes, NO_SIZES, strict=True))
    has_problem, *largest = max_over_replicas([int(problem is not None), *own], topology)
    if has_problem and topology.num_replicas > 1:
        problems = enumerate(gather_objects(problem, topology))
        problem = next(f"rank {rank}: {text}" for rank, text in problems if text is not None)
    return problem, Sizes(*largest)
