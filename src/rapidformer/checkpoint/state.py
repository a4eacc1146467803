"""What a checkpoint consists of: tensors by name, random states as JSON; never a pickle."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rapidformer.dist.collectives import is_alone
from rapidformer.dist.topology import Topology


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
    """A context in which the optimizer steps at once: torch initialises its state that way."""
    gathered: Gathered | None = None
    """Replaces model and optimizer if they cannot be read directly."""
    base: str | None = None
    """Where the frozen model under adapters can be loaded again: its weights are not saved."""
    loaded_from: Path | None = None
    """The checkpoint that ``load`` used."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a resumed run should share with this one."""
    saved_facts: dict[str, Any] = field(default_factory=dict)
    """The same of the checkpoint that was loaded."""


def describe_split(state: TrainingState) -> str | None:
    """Why no rank could save the state by itself; None if each of them holds all of it."""
    topology = state.topology
    if state.gathered is not None:
        return "DeepSpeed keeps a part of the state on each of them"
    if topology.pipeline * topology.tensor * topology.expert > 1:
        return "each of them holds a part of the model"
    optimizer: Any = state.optimizer  # None if only weights are there
    moments = [] if optimizer is None else [t for s in optimizer.state.values() for t in s.values()]
    if any(isinstance(tensor, DTensor) for tensor in (*state.model.parameters(), *moments)):
        return "each of them holds a part of the weights or of the optimizer's state"
    return None


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
            elif isinstance(value, (int, float)):  # some count their steps in plain numbers
                kind = torch.float64 if isinstance(value, float) else torch.int64
                tensors[f"optimizer.{name}.{key}"] = torch.tensor(value, dtype=kind)
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


def get_world_size() -> int:
    return 1 if is_alone() else dist.get_world_size()


@contextmanager
def bypass_clock(clock: Any) -> Iterator[None]:
    """Let torch step the optimizer once to initialise its state, bypassing the clock."""
    clock.is_bypassed = True
    try:
        yield
    finally:
        clock.is_bypassed = False


# ---- random states -------------------------------------------------------------------------------


def get_random_file(rank: int) -> str:
    return f"random-{rank:05d}.json"


def get_random_states(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's generators."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, words, position, has_gauss, gauss = numpy_state
    version, python_words, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(python_words), gauss_next],
        "numpy": [kind, words.tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Continue with the random numbers of the saved moment."""
    _set_host_states(states)
    torch.set_rng_state(_decode(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode(states["cuda"]), device)


def draw_other_numbers(states: dict[str, Any], replica: int) -> None:
    """Numbers for another layout, from rank 0's: masks must differ where replicas do."""
    _set_host_states(states)
    digest = hashlib.sha256(states["torch"].encode("ascii")).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big") + replica)


def _set_host_states(states: dict[str, Any]) -> None:
    version, python_words, gauss_next = states["python"]
    random.setstate((version, tuple(python_words), gauss_next))
    kind, words, *others = states["numpy"]
    numpy_state: Any = (kind, np.array(words, dtype=np.uint32), *others)
    np.random.set_state(numpy_state)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
