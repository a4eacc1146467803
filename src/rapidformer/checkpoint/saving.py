"""Save a checkpoint: every rank writes its own files, and rank 0 publishes them.

It is the whole state: parameters and optimizer (``state/``, by tensor name), schedule, scaler and
the global data position (``run.json``), each rank's random states (``random-00000.json``), and the
model's configuration and tokenizer (``model/``). Weights that are NaN or infinite are never saved:
nobody can train on from them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rapidformer.checkpoint.finding import FORMAT, RUN, TRACKER, find_checkpoints, name_checkpoint
from rapidformer.checkpoint.frozen import compute_base_checksums, find_frozen
from rapidformer.checkpoint.index import Index
from rapidformer.checkpoint.pieces import (
    Piece,
    belongs_to_model,
    finish_tensors,
    join_weights,
    name_model_file,
    plan_pieces,
    write_model_file,
    write_pieces,
    write_weight_map,
)
from rapidformer.checkpoint.publish import (
    Digest,
    HashedFile,
    get_staging,
    publish,
    read_json,
    replace_text,
    start_staging,
    withdraw,
)
from rapidformer.checkpoint.state import (
    TrainingState,
    collect_tensors,
    get_random_file,
    get_random_states,
    get_rank,
    get_world_size,
    keep_json,
)
from rapidformer.checkpoint.writing import run_on_first, warn_if_full, writing
from rapidformer.dist.collectives import (
    broadcast_object,
    gather_from_all,
    gather_on_first,
    is_apart,
)
from rapidformer.dist.whole import get_shard
from rapidformer.errors import CheckpointError, TrainingError, WriteError, list_some
from rapidformer.hub import quiet_transformers
from rapidformer.models.adapter_folder import name_config, to_absolute
from rapidformer.models.adapters import find_adapter
from rapidformer.models.location import DESCRIPTION
from rapidformer.models.plan import find_tied
from rapidformer.models.processor_files import without_last_call

_STATE = "state"
_Written = tuple[Index, dict[str, Digest]]
"""What one rank has written: its tensors, and the digests of its files."""


@dataclass(kw_only=True)
class Save:
    """A checkpoint that is ready to be written."""

    folder: Path
    """The run's."""
    step: int
    pieces: list[Piece] = field(default_factory=list)
    """This rank's part of the tensors; they share memory with the model until they are copied."""
    files: dict[str, str] = field(default_factory=dict)
    """This rank's other files, by name."""
    has_model: bool = False
    """Whether the weights go to files that ``from_pretrained`` reads."""
    total_bytes: int = 0
    """Of all ranks' pieces."""
    keep: int | None = None
    """How many checkpoints are kept; all by default."""
    protected: Path | None = None
    """A checkpoint that is kept in any case."""
    before_publishing: Callable[[], None] = lambda: None
    """Called on rank 0 when all is written; it may raise."""
    after_publishing: Callable[[], None] = lambda: None
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    """Ends the writing early, as a failure."""
    is_behind: bool = False
    """Whether training continued while it was written."""
    write_seconds: float = 0.0

    @property
    def target(self) -> Path:
        return self.folder / name_checkpoint(self.step)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write and publish the checkpoint; every rank must call this, and all fail if one does."""
        started = time.monotonic()
        written: _Written = {}, {}
        failure: Exception | None = None
        # Whatever went wrong is exchanged first: no rank may wait for one that has given up.
        try:
            with writing(self.folder):
                written = self._write_files()
        except Exception as error:
            failure = error
        everyone = gather_on_first((written, self._describe(failure)), group)
        if everyone is not None:
            failure = failure or next((problem for _, problem in everyone if problem), None)
            try:
                with writing(self.folder):
                    if failure is None:
                        self._publish([written for written, _ in everyone])
            except Exception as error:
                failure = error
        problem = broadcast_object(self._describe(failure), group)
        self.write_seconds = time.monotonic() - started
        if failure is not None or problem is not None:
            raise failure or cast(Exception, problem)

    def _write_files(self) -> _Written:
        staging = get_staging(self.target)
        index: Index = {}
        digests: dict[str, Digest] = {}
        (staging / _STATE).mkdir(exist_ok=True)  # also here: NFS may not show rank 0's folder yet
        weights = [piece for piece in self.pieces if self.has_model and belongs_to_model(piece)]
        others = [part for part in self.pieces if not (self.has_model and belongs_to_model(part))]
        if weights:
            name = name_model_file(get_rank(), get_world_size())
            index, digests[name] = write_model_file(weights, staging / name, self._check_cancelled)
        if others:
            name = f"{_STATE}/__{get_rank()}_0.distcp"
            rest, digests[name] = write_pieces(others, staging / name, self._check_cancelled)
            index |= rest
        for name, text in self.files.items():
            with HashedFile(staging / name) as file:
                file.write(text.encode("utf-8"))
            digests[name] = file.digest
        return index, digests

    def _publish(self, everyone: list[_Written]) -> None:
        staging = get_staging(self.target)
        index = finish_tensors((index for index, _ in everyone), staging / _STATE)
        if self.has_model and len(everyone) > 1:
            write_weight_map(index, staging)
        self.before_publishing()
        publish(self.target, digests={k: v for _, digests in everyone for k, v in digests.items()})
        replace_text(self.folder / TRACKER, str(self.step))
        # The one just saved is the newest, even if a run that went back has later steps there.
        older = [path for path in find_checkpoints(self.folder) if path != self.target]
        for path in [*older, self.target][: -self.keep] if self.keep else []:
            if path != self.protected:
                withdraw(path)
        self.after_publishing()
        warn_if_full(self.folder, self.total_bytes)

    def _check_cancelled(self) -> None:
        if self.is_cancelled.is_set():
            raise WriteError(str(self.folder), "the run was stopped")

    def _describe(self, failure: Exception | None) -> CheckpointError | None:
        """The failure as other ranks should raise it."""
        if failure is None or isinstance(failure, CheckpointError):
            return failure
        reason = f"rank {get_rank()} failed with {type(failure).__name__}: {failure}"
        return WriteError(str(self.folder), reason)


def prepare_save(
    folder: Path,
    state: TrainingState,
    extra: dict[str, Any],
    *,
    keep: int | None = None,
    protected: Path | None = None,
    with_optimizer: bool = True,
    with_random_states: bool = True,
    with_model: bool = False,
    processor: Any = None,
) -> Save:
    """Collect and check the state of the current step; every rank must call this."""
    tensors, groups = collect_tensors(state, with_optimizer=with_optimizer)
    check_finite(state.model, tensors, state.step)
    save = Save(
        folder=folder, step=state.step, keep=keep, protected=protected, has_model=with_model
    )

    def open_staging() -> None:
        staging = start_staging(save.target)
        (staging / _STATE).mkdir()
        # Here, not in the background: a tokenizer in use cannot be saved by a thread.
        describe_model(state.model, processor, staging / DESCRIPTION)

    run_on_first(open_staging, folder)
    _leave_out_base(tensors, state)
    checksums = None if state.base is None else compute_base_checksums(state)
    # Rank 0 writes the ties of all ranks: it may hold neither the stage nor the weight itself.
    everyones_ties = gather_from_all(_drop_tied(tensors, state.model))
    if with_model:
        join_weights(tensors)
    save.pieces = plan_pieces(tensors)
    save.total_bytes = sum(gather_from_all(sum(piece.data.nbytes for piece in save.pieces)))
    if with_random_states:
        states = get_random_states(state.device)
        save.files[get_random_file(get_rank())] = json.dumps(states, indent=1)
    if get_rank() == 0:
        warn_if_full(folder, save.total_bytes)
        run = {
            "format": FORMAT,
            "step": state.step,
            "layout": state.topology.describe(),
            "is_by_first": is_apart(),
            "facts": state.facts,
            "scheduler": keep_json(state.scheduler.state_dict()),
            "scaler": state.scaler.state_dict() if state.scaler else None,
            "loader": state.loader.state_dict() if state.loader is not None else None,
            "param_groups": groups,
            "extra": extra,
            "tied": {name: first for ties in everyones_ties for name, first in ties.items()},
            "counter": _read_counter(tensors),
        }
        if checksums is not None:
            run["base"] = {"name": state.base, "checksums": checksums}
        save.files[RUN] = json.dumps(run, indent=1)
    return save


def _read_counter(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """How far Adam has counted, by the name of one counter: it binds the tensors to their step."""
    for name, tensor in tensors.items():
        if name.startswith("optimizer.") and name.endswith(".step"):
            return {} if isinstance(tensor, DTensor) else {name: tensor.tolist()}
    return {}


def plan_save(state: TrainingState, *, with_optimizer: bool) -> list[Piece]:
    """What this rank would write if the state were saved now; every rank must call this."""
    tensors, _ = collect_tensors(state, with_optimizer=with_optimizer)
    _leave_out_base(tensors, state)
    _drop_tied(tensors, state.model)
    return plan_pieces(tensors)


def _leave_out_base(tensors: dict[str, torch.Tensor], state: TrainingState) -> None:
    """Drop the weights of a base model that can be loaded again."""
    if state.base is not None:
        for name in find_frozen(tensors, state.model):
            del tensors[name]


def _drop_tied(tensors: dict[str, torch.Tensor], model: nn.Module) -> dict[str, str]:
    """Drop the further names of tied weights; returns the name that each is stored under."""
    ties: dict[str, str] = {}
    for stored, *others in ([f"model.{name}" for name in names] for names in find_tied(model)):
        for other in others:
            if stored in tensors and other in tensors:
                del tensors[other]
                ties[other] = stored
    return ties


def check_finite(model: nn.Module, tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Stop all ranks if a trained weight is not finite; others may hold an infinity on purpose."""
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: tensor for name, tensor in tensors.items() if name in trained}
    bad = [name for names in gather_from_all(_find_not_finite(weights)) for name in names]
    if bad:
        names = list(dict.fromkeys(name.removeprefix("model.") for name in bad))
        raise TrainingError(
            f"the weights are not finite at step {step} ({list_some(names, 1)}): this state is not "
            "saved, and earlier checkpoints stay as they are. Resume from one of them with a lower "
            "--lr or --clip-grad 1.0."
        )


def _find_not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Needs no memory, unlike ``isfinite`` of whole tensors."""
    verdicts: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        local = get_shard(tensor)
        if local.numel() and local.is_floating_point():
            smallest, largest = torch.aminmax(local.detach())  # both are NaN if one element is
            verdicts[name] = smallest.isfinite() & largest.isfinite()
    if not verdicts:
        return []
    # One transfer: reading each verdict by itself would wait for the device every time.
    device = next(iter(verdicts.values())).device
    is_finite = torch.stack([verdict.to(device) for verdict in verdicts.values()]).tolist()
    return [name for name, is_fine in zip(verdicts, is_finite, strict=True) if not is_fine]


ADAPTER = "adapter"
"""The folder with the configuration of the model's adapter."""
ORIGIN = "origin.json"
"""Which model training started from, and what peft calls the adapter."""


def describe_model(model: Any, processor: Any, folder: Path) -> None:
    """Write the configuration and the tokenizer of a Hugging Face model, but no weights."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    folder.mkdir()
    adapter = find_adapter(model)
    with quiet_transformers(None):
        name_config(model).save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if hasattr(processor, "save_pretrained"):
            with without_last_call(processor):
                processor.save_pretrained(folder)
        if adapter is not None:
            adapter.config.save_pretrained(str(folder / ADAPTER))
    base = adapter.base if adapter else getattr(model, "name_or_path", None)
    origin = {"model": to_absolute(base), "adapter": adapter.name if adapter else None}
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1), encoding="utf-8")


def read_origin(folder: Path) -> str | None:
    """The folder or Hub name of the model that training started from; None if unknown."""
    model = read_json(folder / ORIGIN, or_nothing=True).get("model")
    return model if isinstance(model, str) and model else None


def read_adapter_name(folder: Path) -> str:
    """What peft calls the adapter, which is part of the names of its weights."""
    return str(read_json(folder / ORIGIN, or_nothing=True).get("adapter") or "default")
