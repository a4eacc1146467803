"""The optimizer's part of a CUDA graph: clipping and the update, right after the passes.

The gradients then never leave the graph, so it is only used if nothing looks at them in between,
and for an optimizer that reads all that changes from the device (``optim/multi_tensor``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rapidformer.optim.gradients import get_divisor, take_gradients
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.multi_tensor.launch import Launch


class GraphedUpdate:
    """How the optimizer uses a finished gradient inside a graph."""

    def __init__(self, optimizer: MultiTensorAdamW, max_norm: float, device: torch.device) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._flag = torch.zeros((), device=device)
        """1.0 while nothing may change."""

    def find_launch(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
    ) -> Launch | None:
        """The update with such gradients, ready to be recorded; None if it must run outside."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            launch = self._optimizer.find_launch()
        finally:
            take_gradients(parameters)
        known = {id(parameter) for parameter in parameters}
        if launch is None or not all(id(each) in known for each in launch.parameters):
            return None
        return launch if launch.prepare() else None

    def run(self, launch: Launch, gradients: dict[int, Tensor], norm: Tensor) -> None:
        """Clip and update; ``gradients`` by the ids of their parameters."""
        # As the optimizer does it outside, so that the bits are the same.
        divisor = get_divisor(norm, self._max_norm) if self._max_norm > 0 else None
        launch.run(divisor, self._flag, [gradients[id(each)] for each in launch.parameters])

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """Inside, no update changes anything."""
        self._flag.fill_(1.0)
        try:
            yield
        finally:
            self._flag.fill_(0.0)
