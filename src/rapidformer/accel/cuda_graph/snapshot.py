"""What passes may change besides gradients, to put it back: random numbers, buffers and similar.

A replay draws on the device only. Most numbers drawn on the host have an effect that a replay would
not repeat, but many models draw some that they never use.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.models.plan import LAYER_DROPS, find_plan
from rapidformer.overlay import get_own_class


class Snapshot:
    """What passes may change, apart from gradients: random numbers, buffers and similar."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device, is_cuda = device, device.type == "cuda"
        self._drawn = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
        self.host_numbers = HostNumbers(has_device=is_cuda)
        self._tensors = [(t, t.detach().clone(), count_changes(t)) for t in tensors]

    def restore(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._drawn, self._device)
        else:
            torch.set_rng_state(self._drawn)
        self.host_numbers.restore()
        for tensor, value, changes in self._tensors:
            # torch's batch_norm changes its statistics without counting it.
            if count_changes(tensor) != changes or not torch.equal(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)


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
        """How many numbers were drawn since, all of them without effect.

        0 or ``expected``, which is what ``count_unused_numbers`` says. Raises
        ``NotRepeatableError`` if others were drawn: a replay would repeat what they have caused.
        """
        now = [random.getstate(), np.random.get_state()]
        if str(now) == str(self._others):
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
    """How many numbers a forward pass in training draws without using them.

    Many of transformers' models draw one for each block to decide whether to skip it, even if they
    never do. A custom model may draw as many for another purpose.
    """
    get_base: Any = getattr(model, "get_base_model", None)  # an adapter's
    if not is_own_model(get_own_class(model if get_base is None else get_base())):
        return 0
    chances = [getattr(getattr(model, "config", None), name, None) for name in LAYER_DROPS]
    never_skips = not any(chances) and any(chance is not None for chance in chances)
    return len(find_plan(model).blocks) if never_skips else 0
