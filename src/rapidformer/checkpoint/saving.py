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

from rapidformer.checkpoint.description import describe_model
from rapidformer.checkpoint.finding import TRACKER, find_checkpoints
from rapidformer.checkpoint.finite import check_finite
from rapidformer.checkpoint.frozen import Checksums, compute_checksums, list_frozen
from rapidformer.checkpoint.publish import (
    get_staging,
    publish,
    replace_text,
    start_staging,
    withdraw,
)
from rapidformer.checkpoint.random_states import get_random_states
from rapidformer.checkpoint.run_file import FORMAT, RUN
from rapidformer.checkpoint.state import (
    TrainingState,
    collect_tensors,
    get_random_file,
    get_rank,
    keep_json,
)
from rapidformer.checkpoint.tensors import save_tensors
from rapidformer.checkpoint.ties import drop_tied
from rapidformer.dist.collectives import gather_from_all, wait_for_all
from rapidformer.models.location import DESCRIPTION


def save_checkpoint(
    folder: Path,
    state: TrainingState,
    extra: dict[str, Any],
    *,
    keep: int | None = None,
    protected: Path | None = None,
    with_optimizer: bool = True,
    with_random_states: bool = True,
    processor: Any = None,
) -> Path:
    """Write a checkpoint of the current step; it is published complete, its name last."""
    target = folder / f"iter_{state.step:07d}"
    tensors, groups = collect_tensors(state, with_optimizer=with_optimizer)
    check_finite(state.model, tensors, state.step)
    if get_rank() == 0:
        start_staging(target)
    wait_for_all()
    staging = get_staging(target)
    checksums = _leave_out_base(tensors, state)
    # Rank 0 writes the ties of all ranks: it may hold neither the stage nor the weight itself.
    ties = {
        k: v for own in gather_from_all(drop_tied(tensors, state.model)) for k, v in own.items()
    }
    save_tensors(tensors, staging / "state")
    if with_random_states:
        _write_json(staging / get_random_file(get_rank()), get_random_states(state.device))
    if get_rank() == 0:
        run = _describe_run(state, groups, extra) | {"tied": ties}
        if checksums is not None:
            run["base"] = {"name": state.base, "checksums": checksums}
        _write_json(staging / RUN, run)
        describe_model(state.model, processor, staging / DESCRIPTION)
    wait_for_all()
    if get_rank() == 0:
        publish(target)
        replace_text(folder / TRACKER, str(state.step))
        _drop_old(folder, target, keep, protected)
    wait_for_all()
    return target


def _drop_old(folder: Path, newest: Path, keep: int | None, protected: Path | None) -> None:
    # The one just saved is the newest, even if a run that went back has later steps there.
    older = [path for path in find_checkpoints(folder) if path != newest]
    for path in [*older, newest][:-keep] if keep else []:
        if path != protected:
            withdraw(path)


def _leave_out_base(tensors: dict[str, torch.Tensor], state: TrainingState) -> Checksums | None:
    """Drop the weights of a base model that can be loaded again; returns their checksums."""
    if state.base is None:
        return None
    frozen = list_frozen(state.model)
    for name in frozen:
        tensors.pop(f"model.{name}", None)
    # DeepSpeed's third stage keeps weights where only it can read them.
    return {} if state.gathered else compute_checksums(state.model, frozen, state.topology)


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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
