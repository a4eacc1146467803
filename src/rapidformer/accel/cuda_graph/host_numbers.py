"""Random numbers that a step draws on the host, which a replay of its CUDA graph would not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.models.plan import LAYER_DROPS, find_plan
from rapidformer.overlay import get_own_class


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
            if torch.equal(self._skip(expected), torch.get_rng_state()):
                return expected
        raise NotRepeatableError(
            "a step draws random numbers on the host, which a replay would not"
        )

    def _skip(self, count: int) -> Tensor:
        assert self._torch is not None
        generator = torch.Generator()
        generator.set_state(self._torch)
        for _ in range(count):
            torch.rand([], generator=generator)
        return generator.get_state()


def draw_unused(count: int) -> None:
    """Draw what the passes would draw: later numbers must not depend on replays."""
    for _ in range(count):
        torch.rand([])


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
