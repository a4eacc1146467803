"""What an objective asks frozen models: the reference's log-probabilities, a teacher's answer.

An objective with ``frozen = ("reference",)`` gets the model that its run started from. A batch may
carry the answers already (``reference_logps``), from a pass over the data before training or over
the update before its stages run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from rapidformer.errors import DataError
from rapidformer.objectives.logprobs import get_token_logprobs
from rapidformer.objectives.objective import AskedModel, Context

T = TypeVar("T")
REFERENCE = "reference"
LOGPS = "reference_logps"
"""Key of a batch: for each row the reference's log-probability of its labelled tokens, summed."""


def get_reference_logprobs(context: Context, inputs: Mapping[str, Any], labels: Tensor) -> Tensor:
    """For each row, the log-probability of its labelled tokens under the reference, summed.

    ``inputs`` are the model's, with ``reference_logps`` if the batch has them.
    """
    known = inputs.get(LOGPS)
    return get_reference_token_logprobs(context, inputs, labels).sum(-1) if known is None else known


def get_reference_token_logprobs(
    context: Context, inputs: Mapping[str, Any], labels: Tensor
) -> Tensor:
    """As ``get_token_logprobs``, under the reference."""
    given = {name: value for name, value in inputs.items() if name not in (LOGPS, "labels")}
    return ask(context, REFERENCE, lambda model: get_token_logprobs(model, given, labels))


def ask(context: Context, name: str, question: Callable[[Any], T]) -> T:
    """``question(model)`` about a frozen model, without gradient; it calls the model once."""
    model = context.frozen[name]
    if isinstance(model, AskedModel):
        return model.ask(question)
    with torch.no_grad():
        return question(model)


class Precomputed:
    """The reference of a run whose batches carry its answers."""

    def ask(self, question: Callable[[Any], Any]) -> NoReturn:
        raise DataError(
            f"--precompute-reference: a batch has no {LOGPS}, so its rows are not among those of "
            "the run's training, validation or test data. Leave the flag out."
        )
