"""Log-probabilities of a frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rapidformer.objectives.logprobs import get_token_logprobs
from rapidformer.objectives.objective import Context

REFERENCE = "reference"
T = TypeVar("T")


def get_reference_logprobs(
    context: Context, inputs: Mapping[str, Tensor], labels: Tensor
) -> Tensor:
    """The log-probability of each row's labelled tokens: computed before, or by the reference."""
    if "reference_logps" in inputs:
        return inputs["reference_logps"]
    with torch.no_grad():
        return get_token_logprobs(context.frozen[REFERENCE], inputs, labels).sum(1)


def ask(context: Context, name: str, question: Callable[[Any], T]) -> T:
    """``question(model)`` about a frozen model, without gradient; it calls the model once."""
    with torch.no_grad():
        return question(context.frozen[name])
