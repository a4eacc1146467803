"""Read what ``run_forward_step`` returns as a mean loss and its weight.

- a scalar loss: the weight is the number of labels in the batch, which the engine knows;
- ``(loss, n)``: the user says what the mean was taken over;
- ``(loss, n, {name: value})``: also the parts of the loss; names ending in ``_loss`` are printed
  next to it, all go to metrics.jsonl; a mean over something else is given as ``(value, n)``;
- ``(output, loss_function)``: ``loss_function(output) -> (loss, {name: value})``;
- a dict with ``loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rapidformer.errors import RapidformerError

Weight = float | torch.Tensor | None
"""None: the user did not say what the mean was taken over, so the batch's labels are counted."""


class ForwardResult(NamedTuple):
    """The result of a forward step; the engine counts a weight of None."""

    loss: torch.Tensor
    weight: float | torch.Tensor | None
    parts: Mapping[str, tuple[torch.Tensor, float | torch.Tensor | None]] = MappingProxyType({})
    """The parts of the loss by name, each a mean over its own weight; only for display."""


def interpret_forward(returned: Any) -> ForwardResult:
    """The loss and its weight; the error says what is expected."""
    weight: Weight = None
    parts: Any = {}
    if isinstance(returned, Mapping):
        returned = returned.get("loss")
    elif isinstance(returned, tuple) and len(returned) == 2:
        first, second = returned
        if callable(second) and not isinstance(second, torch.Tensor):
            returned = second(first)
            if isinstance(returned, tuple):
                returned, parts = (*returned, {})[:2]
        else:
            returned, weight = first, _check_weight(second)
    elif isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping):
        returned, weight, parts = returned[0], _check_weight(returned[1]), returned[2]
    if not isinstance(returned, torch.Tensor):
        raise RapidformerError(
            f"run_forward_step must return the loss, a tensor, got {type(returned).__name__}."
        )
    if returned.dim():
        raise RapidformerError(
            f"run_forward_step must return one number, got a tensor of shape "
            f"{list(returned.shape)}: return loss.mean(), or (loss.sum() / n, n)."
        )
    return ForwardResult(returned, weight, _read_parts(parts, weight))


def _read_parts(parts: Any, weight: Weight) -> dict[str, tuple[torch.Tensor, Weight]]:
    """The numbers that a loss function returns by name, such as ``lm loss``."""
    if not isinstance(parts, Mapping):
        return {}
    read: dict[str, tuple[torch.Tensor, Weight]] = {}
    for name, value in parts.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        mean, own = (value[0], _check_weight(value[1])) if is_pair else (value, weight)
        if isinstance(mean, torch.Tensor) and mean.numel() == 1:
            read[str(name).strip().replace(" ", "_")] = mean.detach().reshape(()), own
    return read


def _check_weight(weight: Any) -> Weight:
    if weight is None:
        return None
    is_number = isinstance(weight, (int, float)) or (
        isinstance(weight, torch.Tensor) and weight.numel() == 1
    )
    if not is_number:
        raise RapidformerError(
            "run_forward_step returned a pair: its second item must be what the loss is a mean "
            f"over (a number) or a loss function, got {type(weight).__name__}."
        )
    return weight.reshape(()) if isinstance(weight, torch.Tensor) else float(weight)


class ForwardStep:
    """A forward step as a function of the batch only."""

    def __init__(
        self, run: Callable[[Any], ForwardResult], steps: Sequence[Callable[..., Any]]
    ) -> None:
        self._run = run
        self.steps = steps
        """The user's code in it, which ``--cuda-graph`` examines."""

    def __call__(self, batch: Any) -> ForwardResult:
        return self._run(batch)


class SingleBatch(Iterator[Any]):
    """The data iterator of a pre-training step, with exactly one micro-batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._is_taken = False

    def __next__(self) -> Any:
        if self._is_taken:
            raise RapidformerError(
                "run_forward_step took a second batch from its iterator: it is called once for "
                "each micro-batch."
            )
        self._is_taken = True
        return self._batch
