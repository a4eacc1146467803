"""The checkpoints of a run: ``iter_0000100/`` folders and the name of the newest.

A checkpoint is the whole state: parameters and optimizer (``state/``, by tensor name), schedule,
scaler and the global data position (``run.json``), each rank's random states
(``random-00000.json``), and the model's configuration and tokenizer (``model/``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.checkpoint.description import describe_model
from rapidformer.checkpoint.finding import TRACKER, find_checkpoint, find_checkpoints
from rapidformer.checkpoint.finite import check_finite
from rapidformer.checkpoint.frozen import (
    Checksums,
    compare_checksums,
    compute_checksums,
    list_frozen,
)
from rapidformer.checkpoint.publish import (
    check_manifest,
    get_staging,
    publish,
    read_json,
    replace_text,
    start_staging,
)
from rapidformer.checkpoint.random_states import (
    draw_other_numbers,
    get_random_states,
    set_random_states,
)
from rapidformer.checkpoint.run_file import FORMAT, RUN, blaming, read_run
from rapidformer.checkpoint.tensors import save_tensors
from rapidformer.checkpoint.ties import drop_tied, load_named, read_saved_shapes
from rapidformer.compat.torch_schedulers import get_saved_rates, set_position
from rapidformer.dist.collectives import (
    broadcast_object,
    gather_from_all,
    gather_from_stages,
    wait_for_all,
)
from rapidformer.dist.topology import Topology
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger
from rapidformer.models.location import DESCRIPTION


class Stateful(Protocol):
    """Something whose state is a small dictionary."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Gathered(Protocol):
    """Model and optimizer under a strategy that has its own way of splitting them."""

    def collect(
        self, *, with_optimizer: bool
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]] | None]:
        """Whole tensors by name, each on one of the ranks."""

    def get_wanted(self, *, with_optimizer: bool) -> dict[str, torch.Tensor]:
        """Names and full shapes of what is to be restored."""

    def iterate_parts(
        self, wanted: dict[str, torch.Tensor]
    ) -> Iterator[dict[str, torch.Tensor]]: ...

    def put(self, tensors: dict[str, torch.Tensor]) -> None: ...


@dataclass(kw_only=True)
class TrainingState:
    """What a checkpoint consists of."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: Stateful | None
    loader: Stateful | None
    step: int
    device: torch.device
    topology: Topology
    bypass: Any
    """A context manager in which the optimizer steps at once (torch initialises its state that
    way).
    """
    gathered: Gathered | None = None
    """Replaces model and optimizer if they cannot be read directly."""
    base: str | None = None
    """Where the frozen base model of adapters can be loaded again; its weights are then not saved.
    """
    loaded_from: Path | None = None
    """The checkpoint that ``load`` used."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a resumed run should share with this one."""
    saved_facts: dict[str, Any] = field(default_factory=dict)
    """The same of the checkpoint that was loaded."""


class CheckpointStore:
    """The checkpoints in one run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
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
        target = self.folder / f"iter_{state.step:07d}"
        tensors, groups = _collect_tensors(state, with_optimizer=with_optimizer)
        check_finite(state.model, tensors, state.step)
        if _get_rank() == 0:
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
            _write_json(staging / _get_random_file(_get_rank()), get_random_states(state.device))
        if _get_rank() == 0:
            run = _describe_run(state, groups, extra) | {"tied": ties}
            if checksums is not None:
                run["base"] = {"name": state.base, "checksums": checksums}
            _write_json(staging / RUN, run)
            describe_model(state.model, processor, staging / DESCRIPTION)
        wait_for_all()
        if _get_rank() == 0:
            publish(target)
            replace_text(self.folder / TRACKER, str(state.step))
            self._drop_old(target, keep, protected)
        wait_for_all()
        return target

    def _drop_old(self, newest: Path, keep: int | None, protected: Path | None) -> None:
        # The one just saved is the newest, even if a run that went back has later steps there.
        older = [folder for folder in find_checkpoints(self.folder) if folder != newest]
        for folder in [*older, newest][:-keep] if keep else []:
            if folder != protected:
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def load(
        source: Path,
        state: TrainingState,
        *,
        with_optimizer: bool = True,
        with_random_states: bool = True,
        with_position: bool = True,
    ) -> dict[str, Any]:
        """Restore the state in place from a checkpoint, or the newest complete one of a run."""
        folder = state.loaded_from = _choose_whole(source)
        run = read_run(folder)
        state.saved_facts = run.get("facts", {})
        if with_optimizer and run["param_groups"] is None:
            with_optimizer = False
            if _get_rank() == 0:
                get_logger().warning(
                    "%s was saved without optimizer state: the optimizer starts from scratch.",
                    folder,
                )
        _check_base(folder, state, run.get("base"))
        _load_tensors(folder, state, with_optimizer=with_optimizer)
        with blaming(folder):
            if with_position:
                _restore_position(state, run)
            if with_random_states:
                _load_random_states(folder, run, state)
        extra: dict[str, Any] = run["extra"] if with_position else {}
        return extra


def _restore_position(state: TrainingState, run: dict[str, Any]) -> None:
    state.step = run["step"]
    if state.loader is not None and run["loader"] is not None:
        state.loader.load_state_dict(run["loader"])
    if state.scaler is not None and run["scaler"] is not None:
        state.scaler.load_state_dict(run["scaler"])
    _restore_schedule(state, run)


def is_without_base(folder: Path) -> bool:
    """Whether a checkpoint holds adapters only, and no weights of the model under them."""
    return "base" in read_run(folder)


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint that is incomplete, modified, or not one that a run writes."""
    check_manifest(folder, required=(RUN, "state/.metadata"))
    read_run(folder)
    read_saved_shapes(folder)


def _choose_whole(source: Path) -> Path:
    """The checkpoint to load: checked by rank 0, used by all.

    A damaged checkpoint that was named is refused; of a run, the newest complete one is used.
    """
    chosen: Path | None = None
    problem = f"{source} holds no checkpoint (no iter_… folder)."
    if _get_rank() == 0:
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


def _collect_tensors(
    state: TrainingState, *, with_optimizer: bool, fills: bool = False
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]] | None]:
    """Everything to save by tensor name, and the optimizer's settings separately."""
    if state.gathered is not None:
        tensors, groups = state.gathered.collect(with_optimizer=with_optimizer)
        return tensors, None if groups is None else [_keep_json(group) for group in groups]
    weights: dict[str, Any] = get_model_state_dict(state.model)
    tensors = {f"model.{name}": w for name, w in weights.items()}
    if not with_optimizer:
        return tensors, None
    is_fresh = not state.optimizer.state
    with state.bypass():
        content: dict[str, Any] = get_optimizer_state_dict(state.model, state.optimizer)
    if is_fresh and not fills:
        # torch initialised the state with a step of rate 0, which Adam counts: not ours to keep.
        state.optimizer.state.clear()
        content["state"] = {}
    for name, values in content["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors, [_keep_json(group) for group in content["param_groups"]]


def _leave_out_base(tensors: dict[str, torch.Tensor], state: TrainingState) -> Checksums | None:
    """Drop the weights of a base model that can be loaded again; returns their checksums."""
    if state.base is None:
        return None
    frozen = list_frozen(state.model)
    for name in frozen:
        tensors.pop(f"model.{name}", None)
    # DeepSpeed's third stage keeps weights where only it can read them.
    return {} if state.gathered else compute_checksums(state.model, frozen, state.topology)


def _check_base(folder: Path, state: TrainingState, saved: dict[str, Any] | None) -> None:
    if saved is not None and not list_frozen(state.model):
        raise CheckpointError(
            f"{folder} holds the adapter of a model that is not in it: give the --lora-rank or "
            "--peft-config of the first run, and the same model."
        )
    if saved is None or not saved["checksums"] or state.gathered is not None:
        return
    found = compute_checksums(state.model, list_frozen(state.model), state.topology)
    compare_checksums(saved["checksums"], found, saved["name"])


def _drop_base(
    tensors: dict[str, torch.Tensor], model: nn.Module, saved: dict[str, tuple[int, ...]]
) -> None:
    """Frozen weights that the checkpoint does not have are in the model already."""
    for name in list_frozen(model):
        if f"model.{name}" not in saved:
            tensors.pop(f"model.{name}", None)


def _load_gathered(
    folder: Path, state: TrainingState, gathered: Gathered, *, with_optimizer: bool
) -> None:
    wanted = gathered.get_wanted(with_optimizer=with_optimizer)
    saved = read_saved_shapes(folder)
    if is_without_base(folder):
        _drop_base(wanted, state.model, saved)
    _drop_stateless(wanted, state.model, saved)
    _compare(folder, wanted, state.topology)
    for part in gathered.iterate_parts(wanted):
        load_named(part, folder, state.topology)
        gathered.put(part)


def _load_tensors(folder: Path, state: TrainingState, *, with_optimizer: bool) -> None:
    if state.gathered is not None:
        _load_gathered(folder, state, state.gathered, with_optimizer=with_optimizer)
        return
    tensors, _ = _collect_tensors(state, with_optimizer=with_optimizer, fills=True)
    saved = read_saved_shapes(folder)
    if is_without_base(folder):
        _drop_base(tensors, state.model, saved)
    stateless = _drop_stateless(tensors, state.model, saved)
    _compare(folder, tensors, state.topology)
    load_named(tensors, folder, state.topology)
    prefix = "model."
    model_part: dict[str, Any] = {
        name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)
    }
    # Names were compared above. Batch norms of other stages look for counters and add their own.
    set_model_state_dict(state.model, model_part, options=StateDictOptions(strict=False))
    if not with_optimizer:
        return
    with state.bypass():
        content: dict[str, Any] = get_optimizer_state_dict(state.model, state.optimizer)
        for name, values in content["state"].items():
            for key in values:
                values[key] = tensors.get(f"optimizer.{name}.{key}", values[key])
        set_optimizer_state_dict(state.model, state.optimizer, content)
    for parameter in stateless:
        state.optimizer.state.pop(parameter, None)


def _drop_stateless(
    tensors: dict[str, torch.Tensor], model: nn.Module, saved: dict[str, tuple[int, ...]]
) -> list[nn.Parameter]:
    """Parameters that had no gradient yet when the checkpoint was made have no state in it."""
    stateless: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        if f"model.{name}" in saved and not any(key.startswith(prefix) for key in saved):
            for key in [key for key in tensors if key.startswith(prefix)]:
                del tensors[key]
            stateless.append(parameter)
    return stateless


def _compare(folder: Path, tensors: dict[str, torch.Tensor], topology: Topology) -> None:
    """Report a checkpoint that was made for another model or optimizer."""
    saved = read_saved_shapes(folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # Under a pipeline, each rank has only some of the names.
    elsewhere = {name for names in gather_from_stages(sorted(wanted), topology) for name in names}
    problems = [f"{name} is not in it" for name in wanted if name not in saved]
    problems += [
        f"{name} has shape {list(saved[name])}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    problems += [
        f"{name} is in it, but not in the model"
        for name in saved
        if name not in elsewhere and name.startswith("model.")
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" * (len(problems) > 5))
        raise CheckpointError(f"{folder} was saved from another model or optimizer: {shown}.")


def _describe_run(
    state: TrainingState, groups: list[dict[str, Any]] | None, extra: dict[str, Any]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": state.step,
        "layout": state.topology.describe(),
        "facts": state.facts,
        "scheduler": _keep_json(state.scheduler.state_dict()),
        "scaler": state.scaler.state_dict() if state.scaler else None,
        "loader": state.loader.state_dict() if state.loader is not None else None,
        "param_groups": groups,
        "extra": extra,
    }


def _restore_schedule(state: TrainingState, run: dict[str, Any]) -> None:
    """Move the schedule to the saved position.

    A schedule that is a function of the position follows the current settings: a run may be resumed
    for longer, or with another rate. Any other kind continues from its saved state.
    """
    scheduler, saved = state.scheduler, run["scheduler"]
    if isinstance(scheduler, LambdaLR):
        move_schedule(scheduler, state.optimizer, saved["last_epoch"])
        return
    # What JSON cannot hold (functions) is the same in the scheduler built now.
    scheduler.load_state_dict({**scheduler.state_dict(), **saved})
    # DeepSpeed's schedulers do not keep the rates in their state.
    rates = get_saved_rates(saved) or scheduler.get_lr()
    for group, rate in zip(state.optimizer.param_groups, rates, strict=False):
        group["lr"] = rate


def move_schedule(scheduler: LambdaLR, optimizer: Optimizer, position: int) -> None:
    """Set a schedule, and with it the learning rates, to what they are after this many updates."""
    rates = [
        base * function(position)
        for base, function in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    set_position(scheduler, position, rates)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate


def _load_random_states(folder: Path, run: dict[str, Any], state: TrainingState) -> None:
    first = folder / _get_random_file(0)
    if not first.is_file():
        get_logger().warning("%s was saved without random states: dropout starts anew.", folder)
        return
    # By layout, not by the number of ranks: two replicas draw different masks, two halves of a
    # layer the same ones.
    is_same = run.get("layout") == state.topology.describe()
    path = folder / _get_random_file(_get_rank()) if is_same else first
    states = read_json(path)
    if is_same:
        set_random_states(states, state.device)
        return
    draw_other_numbers(states, state.topology.get_rank("data"))
    if _get_rank() == 0:
        get_logger().warning(
            "%s was saved by another layout of ranks: dropout draws other random numbers than the "
            "first run would have.", folder,
        )  # fmt: skip


def _keep_json(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold; tuples (Adam's betas) become lists, which is fine."""
    return {key: value for key, value in values.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _get_random_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


@contextmanager
def bypass_clock(clock: Any) -> Iterator[None]:
    """Let torch step the optimizer once to initialise its state, bypassing the clock."""
    clock.is_bypassed = True
    try:
        yield
    finally:
        clock.is_bypassed = False
