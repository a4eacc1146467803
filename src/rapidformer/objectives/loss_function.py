"""A user's loss function or forward step as an objective.

It may return

- a scalar loss: its count is the number of labels in the batch, which the engine knows;
- ``(loss, n)``: the user says what the mean was taken over;
- ``(loss, n, {name: value})``: also values to show; names ending in ``_loss`` are printed next to
  the loss, all go to metrics.jsonl; a mean over something else is given as ``(value, n)``;
- ``(output, loss_function)``, where ``loss_function(output) -> (loss, {name: value})``;
- a dict with ``loss``;
- ``Term`` objects by name, if the loss has several terms with one count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rapidformer.errors import RapidformerError
from rapidformer.objectives.objective import Context, Count, Objective, Term, Terms


class LossFunction(Objective):
    """What a function of the model and the batch returns."""

    def __init__(
        self, function: Callable[[Any, Any], Any], steps: Sequence[Callable[..., Any]] | None = None
    ) -> None:
        """``steps`` is the user's code in the function, if that is not the function itself."""
        self._function = function
        self._steps = [function] if steps is None else list(steps)

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        return read_terms(self._function(model, batch))

    def list_steps(self) -> list[Callable[..., Any]]:
        return self._steps


def read_terms(returned: Any) -> Terms:
    """The loss and what is to be shown with it; the error says what is expected."""
    count: Count | None = None
    shown: Any = {}
    if isinstance(returned, Mapping):
        if returned and all(isinstance(value, Term) for value in returned.values()):
            return returned
        returned = returned.get("loss")
    elif isinstance(returned, tuple) and len(returned) == 2:
        first, second = returned
        if callable(second) and not isinstance(second, torch.Tensor):
            returned = second(first)
            if isinstance(returned, tuple):
                returned, shown = (*returned, {})[:2]
        else:
            returned, count = first, _check_count(second)
    elif isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping):
        returned, count, shown = returned[0], _check_count(returned[1]), returned[2]
    if not isinstance(returned, torch.Tensor):
        raise RapidformerError(
            f"run_forward_step must return the loss, a tensor, got {type(returned).__name__}."
        )
    if returned.dim():
        raise RapidformerError(
            f"run_forward_step must return one number, got a tensor of shape "
            f"{list(returned.shape)}: return loss.mean(), or (loss.sum() / n, n)."
        )
    return {**_read_shown(shown, count), "loss": Term(returned, count)}


def _read_shown(values: Any, count: Count | None) -> dict[str, Term]:
    """The numbers that a loss function returns by name, such as ``lm loss``."""
    if not isinstance(values, Mapping):
        return {}
    terms: dict[str, Term] = {}
    for name, value in values.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        mean, over = (value[0], _check_count(value[1])) if is_pair else (value, count)
        if isinstance(mean, torch.Tensor) and mean.numel() == 1:
            terms[str(name).strip().replace(" ", "_")] = Term(mean.detach().reshape(()), over, 0.0)
    return terms


def _check_count(count: Any) -> Count | None:
    if count is None:
        return None
    is_number = isinstance(count, (int, float)) or (
        isinstance(count, torch.Tensor) and count.numel() == 1
    )
    if not is_number:
        raise RapidformerError(
            "run_forward_step returned a pair: its second item must be what the loss is a mean "
            f"over (a number) or a function of the output, got {type(count).__name__}."
        )
    return count.reshape(()) if isinstance(count, torch.Tensor) else float(count)


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
