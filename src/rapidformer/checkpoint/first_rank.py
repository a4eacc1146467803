"""What rank 0 does to a run's folder for all ranks, and how its failure stops all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rapidformer.checkpoint.writing import writing
from rapidformer.dist.collectives import broadcast_object
from rapidformer.errors import RapidformerError


def run_on_first(action: Callable[[], None], folder: Path, *, is_main: bool) -> None:
    """Run the action on rank 0; every rank must call this, and raises what rank 0 meets.

    Otherwise the other ranks would wait for one that is gone.
    """
    problem: RapidformerError | None = None
    if is_main:
        try:
            with writing(folder):
                action()
        except RapidformerError as error:
            problem = error
    problem = broadcast_object(problem)
    if problem is not None:
        raise problem
