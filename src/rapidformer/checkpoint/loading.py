"""Restore a run's state from a checkpoint, whatever layout saved it; it is checked first."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.checkpoint import frozen
from rapidformer.checkpoint.finding import (
    RUN,
    STATE_INDEX,
    blaming,
    find_checkpoint,
    find_checkpoints,
    read_run,
)
from rapidformer.checkpoint.publish import check_manifest, read_json
from rapidformer.checkpoint.state import (
    TrainingState,
    collect_tensors,
    draw_other_numbers,
    get_random_file,
    get_rank,
    set_random_states,
)
from rapidformer.checkpoint.tensors import check_counter, load_named, read_saved_shapes
from rapidformer.checkpoint.writing import run_on_first
from rapidformer.compat.torch_optimizers import get_saved_rates, set_position
from rapidformer.dist.collectives import gather_from_stages
from rapidformer.dist.topology import Topology
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger, warn
from rapidformer.models.weight_names import NameDifferences, compare_names

_MODEL, _OPTIMIZER = "model.", "optimizer."


def load_checkpoint(
    source: Path,
    state: TrainingState,
    *,
    with_optimizer: bool = True,
    with_random_states: bool = True,
    with_position: bool = True,
    allows_partial: bool = False,
) -> dict[str, Any]:
    """Restore the state from a checkpoint or a run's newest; partly, if it ``allows_partial``."""
    folder = state.loaded_from = choose_complete(source)
    run = read_run(folder)
    state.saved_facts = run.get("facts", {})
    if with_optimizer and run["param_groups"] is None:
        with_optimizer = False
        warn("%s was saved without optimizer state: the optimizer starts from scratch.", folder)
    _check_base(folder, state, run.get("base"))
    _load_tensors(folder, state, with_optimizer=with_optimizer, allows_partial=allows_partial)
    with blaming(folder):
        if with_position:
            state.step = run["step"]
            if state.loader is not None and run["loader"] is not None:
                state.loader.load_state_dict(run["loader"])
            elif state.loader is not None:
                text = "%s was saved without a place in the data, which is read from its start."
                warn(text, folder)
            if state.scaler is not None and run["scaler"] is not None:
                state.scaler.load_state_dict(run["scaler"])
            _restore_schedule(state, run["scheduler"])
        if with_random_states:
            _load_random_states(folder, run, state)
    return run["extra"] if with_position else {}


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint that is incomplete, modified, or not one that a run writes."""
    check_manifest(folder, required=(RUN, STATE_INDEX))
    read_saved_shapes(folder)
    check_counter(folder)


def choose_complete(source: Path) -> Path:
    """The checkpoint to load, checked by rank 0: the one that was named, or a run's newest."""
    return run_on_first(lambda: _find_complete(source), source)


def _find_complete(source: Path) -> Path:
    newest = find_checkpoint(source)
    if newest is None:
        raise CheckpointError(f"{source} holds no checkpoint (no iter_… folder).")
    older = [] if newest == source else find_checkpoints(source)[::-1]
    problem = ""
    for folder in dict.fromkeys([newest, *older]):
        try:
            check_checkpoint(folder)
            return folder
        except CheckpointError as reason:
            problem = str(reason)
            get_logger().warning("%s", reason)
    if older:
        problem = (
            f"none of the checkpoints in {source} is complete; the oldest: {problem} Start "
            "again in another --save folder, or replace this run with --overwrite."
        )
    raise CheckpointError(problem)


def _restore_schedule(state: TrainingState, saved: dict[str, Any]) -> None:
    """Move the schedule to the saved position; a function of it follows the current settings."""
    scheduler = state.scheduler
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


def _put_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Leniently: names were compared before, and batch norms of other stages add their own."""
    taken = inspect.signature(model.load_state_dict).parameters
    if "assign" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        lenient = torch_states.StateDictOptions(strict=False)
        torch_states.set_model_state_dict(model, weights, options=lenient)
    else:  # a method of the model's own, which torch would call with more than it takes
        model.load_state_dict(weights, False)


def _load_tensors(
    folder: Path, state: TrainingState, *, with_optimizer: bool, allows_partial: bool
) -> None:
    gathered = state.gathered
    if gathered is not None:
        tensors = gathered.get_wanted(with_optimizer=with_optimizer)
    else:
        tensors, _ = collect_tensors(state, with_optimizer=with_optimizer, fills=True)
    saved = read_saved_shapes(folder)
    if "base" in read_run(folder):
        # Frozen weights that the checkpoint does not have are in the model already.
        for name in frozen.find_frozen(tensors, state.model):
            if name not in saved:
                del tensors[name]
    stateless = _drop_stateless(tensors, state.model, saved)
    left_out = _compare(folder, tensors, state.topology, allows_partial=allows_partial)
    if gathered is not None:
        for part in gathered.iterate_parts(tensors):
            load_named(part, folder)
            gathered.put(part)
        return
    load_named(tensors, folder)
    model_part: dict[str, Any] = {
        name.removeprefix(_MODEL): t for name, t in tensors.items() if name.startswith(_MODEL)
    }
    _put_weights(state.model, model_part)
    if not with_optimizer:
        return
    with state.bypass():
        content: dict[str, Any] = torch_states.get_optimizer_state_dict(
            state.model, state.optimizer
        )
        for name, values in content["state"].items():
            for key, value in values.items():
                loaded = tensors.get(f"optimizer.{name}.{key}", value)
                is_number = isinstance(loaded, torch.Tensor) and isinstance(value, (int, float))
                values[key] = type(value)(loaded.item()) if is_number else loaded
        torch_states.set_optimizer_state_dict(state.model, state.optimizer, content)
    # Where the optimizer's state was not loaded, it starts from scratch.
    fresh = {
        name.removeprefix(_OPTIMIZER).rpartition(".")[0]
        for name in left_out
        if name.startswith(_OPTIMIZER)
    }
    stateless += [parameter for name, parameter in state.model.named_parameters() if name in fresh]
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


def _compare(
    folder: Path, tensors: dict[str, torch.Tensor], topology: Topology, *, allows_partial: bool
) -> set[str]:
    """Refuse another model or optimizer, or take what differs out of ``tensors``; their names."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # Under a pipeline, each rank has only some of the names.
    wanted = {k: v for stage in gather_from_stages(shapes, topology) for k, v in stage.items()}
    everything = read_saved_shapes(folder)
    if not allows_partial:
        _check_moments(folder, wanted, everything)
    saved = {
        name: shape
        for name, shape in everything.items()
        if name in wanted or name.startswith(_MODEL)
    }
    differences = compare_names(saved, wanted)
    if not differences:
        return set()
    shown = _name_as_in_model(differences)
    if not allows_partial:
        raise CheckpointError(
            f"{folder} was saved from another model or optimizer:{shown.describe()}\n"
            "Give the model of the first run, or pass --allow-partial-load to load only what "
            "matches."
        )
    warn(
        f"{folder} was saved from another model or optimizer, and is loaded in part "
        f"(--allow-partial-load):{shown.describe()}"
    )
    left_out = {*differences.missing, *differences.misshapen}
    for name in left_out:
        tensors.pop(name, None)
    return left_out


def _check_moments(folder: Path, wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Moments in 8 bits have other tensors than those in full: neither loads as the other."""

    def has_codes(names: Iterable[str]) -> bool:
        return any(name.startswith(_OPTIMIZER) and name.endswith("_codes") for name in names)

    was_quantized = has_codes(saved)
    is_needed = any(name.startswith(_OPTIMIZER) for name in wanted)
    if is_needed and was_quantized != has_codes(wanted):
        raise CheckpointError(
            f"{folder} was saved {'with' if was_quantized else 'without'} 8-bit moments "
            "(--optimizer-state-dtype int8): resume the same way, or pass --no-load-optim to start "
            "with new ones."
        )


def _name_as_in_model(differences: NameDifferences) -> NameDifferences:
    """The differences by the model's names; the optimizer's only for weights that match."""
    kinds = (differences.missing, differences.unexpected, differences.misshapen)
    changed = {name for kind in kinds for name in kind}

    def shorten(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name.removeprefix(_MODEL): entry
            for name, entry in entries.items()
            if name.startswith(_MODEL)
            or _MODEL + name.removeprefix(_OPTIMIZER).rpartition(".")[0] not in changed
        }

    missing, unexpected, misshapen = map(shorten, kinds)
    return NameDifferences(missing=missing, unexpected=unexpected, misshapen=misshapen)


def _check_base(folder: Path, state: TrainingState, saved: dict[str, Any] | None) -> None:
    if saved is None:
        return
    if not frozen.list_frozen(state.model):
        raise CheckpointError(
            f"{folder} holds the adapter of a model that is not in it: give the --lora-rank or "
            "--peft-config of the first run, and the same model."
        )
    checksums = frozen.compute_base_checksums(state)
    frozen.compare_checksums(saved["checksums"], checksums, saved["name"])


def _load_random_states(folder: Path, run: dict[str, Any], state: TrainingState) -> None:
    first = folder / get_random_file(0)
    if not first.is_file():
        warn("%s was saved without random states: dropout draws other numbers.", folder)
        return
    # By layout, not by the number of ranks: two replicas draw different masks, two halves of a
    # layer the same ones.
    is_complete = not run.get("is_by_first")
    if is_complete and run.get("layout") == state.topology.describe():
        set_random_states(read_json(folder / get_random_file(get_rank())), state.device)
        return
    draw_other_numbers(read_json(first), state.topology.get_rank("data"))
    how = "by another layout of ranks" if is_complete else "on rank 0 alone"
    warn(
        "%s was saved %s: dropout draws other random numbers than the first run would have.",
        folder, how,
    )  # fmt: skip
