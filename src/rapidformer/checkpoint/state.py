"""What a checkpoint consists of, and its tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rapidformer.dist.topology import Topology


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

    def iterate_frozen(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Every frozen weight, whole, with all of its names."""

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


def collect_tensors(
    state: TrainingState, *, with_optimizer: bool, fills: bool = False
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]] | None]:
    """Everything to save by tensor name, and the optimizer's settings separately."""
    if state.gathered is not None:
        tensors, groups = state.gathered.collect(with_optimizer=with_optimizer)
        return tensors, None if groups is None else [keep_json(group) for group in groups]
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
                tensors |= _unpack(f"optimizer.{name}.{key}", value)
    return tensors, [keep_json(group) for group in content["param_groups"]]


def _unpack(name: str, tensor: Any) -> dict[str, torch.Tensor]:
    """A quantized tensor as the plain ones that it consists of, which share its memory."""
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return {name: tensor}
    parts, _ = tensor.__tensor_flatten__()
    return {f"{name}_{part}": getattr(tensor, part) for part in parts}


def keep_json(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold; tuples (Adam's betas) become lists, which is fine."""
    return {key: value for key, value in values.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_random_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


@contextmanager
def bypass_clock(clock: Any) -> Iterator[None]:
    """Let torch step the optimizer once to initialise its state, bypassing the clock."""
    clock.is_bypassed = True
    try:
        yield
    finally:
        clock.is_bypassed = False
