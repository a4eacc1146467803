"""Check a checkpoint before anything is loaded from it."""

from __future__ import annotations

from pathlib import Path

from rapidformer.checkpoint.finding import find_checkpoint, find_checkpoints
from rapidformer.checkpoint.publish import check_manifest
from rapidformer.checkpoint.run_file import RUN, read_run
from rapidformer.checkpoint.state import get_rank
from rapidformer.checkpoint.tensors import get_index_name
from rapidformer.checkpoint.ties import read_saved_shapes
from rapidformer.dist.collectives import broadcast_object
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint that is incomplete, modified, or not one that a run writes."""
    check_manifest(folder, required=(RUN, f"state/{get_index_name(folder / 'state')}"))
    read_run(folder)
    read_saved_shapes(folder)


def choose_complete(source: Path) -> Path:
    """The checkpoint to load: checked by rank 0, used by all.

    A damaged checkpoint that was named is refused; of a run, the newest complete one is used.
    """
    chosen: Path | None = None
    problem = f"{source} holds no checkpoint (no iter_… folder)."
    if get_rank() == 0:
        newest = find_checkpoint(source)
        older = [] if newest in (None, source) else find_checkpoints(source)[::-1]
        for folder in dict.fromkeys([newest, *older] if newest else []):
            try:
                check_checkpoint(folder)
            except CheckpointError as reason:
                problem = str(reason)
                get_logger().warning("%s", reason)
                continue
            chosen = folder
            break
        if chosen is None and older:
            problem = (
                f"none of the checkpoints in {source} is complete; the oldest: {problem} Start "
                "again in another --save folder, or replace this run with --overwrite."
            )
    chosen, problem = broadcast_object((chosen, problem))
    if chosen is None:
        raise CheckpointError(problem)
    return chosen
