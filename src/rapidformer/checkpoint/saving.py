"""Save a checkpoint.

It is the whole state: parameters and optimizer (``state/``, by tensor name), schedule, scaler and
the global data position (``run.json``), each rank's random states (``random-00000.json``), and the
model's configuration and tokenizer (``model/``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapidformer.checkpoint.description import describe_model
from rapidformer.checkpoint.disk_space import warn_if_full
from rapidformer.checkpoint.finite import check_finite
from rapidformer.checkpoint.frozen import compute_base_checksums, find_frozen
from rapidformer.checkpoint.pieces import Piece, plan_pieces
from rapidformer.checkpoint.publish import start_staging
from rapidformer.checkpoint.random_states import get_random_states
from rapidformer.checkpoint.run_file import FORMAT, RUN
from rapidformer.checkpoint.save import STATE, Save
from rapidformer.checkpoint.state import (
    TrainingState,
    collect_tensors,
    get_random_file,
    get_rank,
    keep_json,
)
from rapidformer.checkpoint.ties import drop_tied
from rapidformer.checkpoint.writing import writing
from rapidformer.dist.collectives import broadcast_object, gather_from_all
from rapidformer.errors import WriteError
from rapidformer.models.location import DESCRIPTION


def save_checkpoint(
    folder: Path, state: TrainingState, extra: dict[str, Any], **options: Any
) -> Path:
    """Write a checkpoint of the current step; it is published complete, its name last."""
    save = prepare_save(folder, state, extra, **options)
    save.write()
    return save.target


def prepare_save(
    folder: Path,
    state: TrainingState,
    extra: dict[str, Any],
    *,
    keep: int | None = None,
    protected: Path | None = None,
    with_optimizer: bool = True,
    with_random_states: bool = True,
    processor: Any = None,
) -> Save:
    """Collect and check the state of the current step; every rank must call this."""
    tensors, groups = collect_tensors(state, with_optimizer=with_optimizer)
    check_finite(state.model, tensors, state.step)
    save = Save(
        folder=folder, step=state.step, pieces=[], files={}, total_bytes=0,
        keep=keep, protected=protected,
    )  # fmt: skip
    _open_staging(save, state.model, processor)
    _leave_out_base(tensors, state)
    checksums = None if state.base is None else compute_base_checksums(state)
    # Rank 0 writes the ties of all ranks: it may hold neither the stage nor the weight itself.
    ties = {
        k: v for own in gather_from_all(drop_tied(tensors, state.model)) for k, v in own.items()
    }
    save.pieces = plan_pieces(tensors)
    save.total_bytes = sum(gather_from_all(sum(piece.data.nbytes for piece in save.pieces)))
    if with_random_states:
        save.files[get_random_file(get_rank())] = _to_text(get_random_states(state.device))
    if get_rank() == 0:
        warn_if_full(folder, save.total_bytes)
        run = _describe_run(state, groups, extra) | {"tied": ties}
        if checksums is not None:
            run["base"] = {"name": state.base, "checksums": checksums}
        save.files[RUN] = _to_text(run)
    return save


def plan_save(state: TrainingState, *, with_optimizer: bool) -> list[Piece]:
    """What this rank would write if the state were saved now; every rank must call this."""
    tensors, _ = collect_tensors(state, with_optimizer=with_optimizer)
    _leave_out_base(tensors, state)
    drop_tied(tensors, state.model)
    return plan_pieces(tensors)


def _open_staging(save: Save, model: nn.Module, processor: Any) -> None:
    """Rank 0 creates the staging folder; if it cannot, all ranks raise."""
    problem: WriteError | None = None
    if get_rank() == 0:
        try:
            with writing(save.folder):
                staging = start_staging(save.target)
                (staging / STATE).mkdir()
                # Here, not in the background: a tokenizer in use cannot be saved by a thread.
                describe_model(model, processor, staging / DESCRIPTION)
        except WriteError as error:
            problem = error
    problem = broadcast_object(problem)
    if problem is not None:
        raise problem


def _leave_out_base(tensors: dict[str, torch.Tensor], state: TrainingState) -> None:
    """Drop the weights of a base model that can be loaded again."""
    if state.base is not None:
        for name in find_frozen(tensors, state.model):
            del tensors[name]


def _describe_run(
    state: TrainingState, groups: list[dict[str, Any]] | None, extra: dict[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": state.step,
        "layout": state.topology.describe(),
        "facts": state.facts,
        "scheduler": keep_json(state.scheduler.state_dict()),
        "scaler": state.scaler.state_dict() if state.scaler else None,
        "loader": state.loader.state_dict() if state.loader is not None else None,
        "param_groups": groups,
        "extra": extra,
    }


def _to_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1)
