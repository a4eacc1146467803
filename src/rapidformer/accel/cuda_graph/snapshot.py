"""The state in which something is recorded, so that it can be put back: numbers and buffers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.models.adapters import get_base
from rapidformer.models.plan import LAYER_DROPS, find_plan
from rapidformer.overlay import get_own_class


class Snapshot:
    """What passes may change, apart from gradients: random numbers, buffers and similar."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.device, self._drawn = device, get_numbers(device)
        self.host_numbers = HostNumbers(has_device=device.type == "cuda")
        self._tensors = [(t, t.detach().clone(), count_changes(t)) for t in tensors]

    def read(self) -> list[Tensor]:
        """What passes have made of it."""
        return [tensor.detach().clone() for tensor, _, _ in self._tensors]

    def restore(self) -> None:
        set_numbers(self._drawn, self.device)
        self.host_numbers.restore()
        for tensor, value, changes in self._tensors:
            # torch's batch_norm changes its statistics without counting it.
            if count_changes(tensor) != changes or not torch.equal(tensor, value):
                # By ``data``: passes that are being recorded may have saved it for going back.
                tensor.data.copy_(value)


def get_numbers(device: torch.device) -> Tensor:
    """The state of the device's random number generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_numbers(state: Tensor, device: torch.device) -> None:
    """Let the device draw the numbers again that follow this state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class HostNumbers:
    """The state of the host's random number generators before the passes of an update."""

    def __init__(self, *, has_device: bool) -> None:
        self._others: list[Any] = [random.getstate(), np.random.get_state()]
        self._torch = torch.get_rng_state() if has_device else None
        """None if the model runs on the host: its own numbers are drawn again."""

    def restore(self) -> None:
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])
        if self._torch is not None:
            torch.set_rng_state(self._torch)

    def count_unused(self, expected: int) -> int:
        """How many numbers were drawn without effect: 0 or ``expected``; others are refused."""
        now = [random.getstate(), np.random.get_state()]
        if pickle.dumps(now) == pickle.dumps(self._others):
            if self._torch is None or torch.equal(self._torch, torch.get_rng_state()):
                return 0
            generator = torch.Generator()
            generator.set_state(self._torch)
            draw_unused(expected, generator)
            if torch.equal(generator.get_state(), torch.get_rng_state()):
                return expected
        raise NotRepeatableError(
            "a step draws random numbers on the host, which a replay would not"
        )


def draw_unused(count: int, generator: torch.Generator | None = None) -> None:
    """Draw what the passes would draw: later numbers must not depend on replays."""
    for _ in range(count):
        torch.rand([], generator=generator)


def count_unused_numbers(model: nn.Module) -> int:
    """How many numbers transformers' models draw to skip blocks which they never skip."""
    if not is_own_model(get_own_class(get_base(model))):
        return 0
    chances = [getattr(getattr(model, "config", None), name, None) for name in LAYER_DROPS]
    never_skips = not any(chances) and any(chance is not None for chance in chances)
    return len(find_plan(model).blocks) if never_skips else 0
