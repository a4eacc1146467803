"""Log-probabilities of a frozen reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rapidformer.objectives.logprobs import get_token_logprobs
from rapidformer.objectives.objective import Context

REFERENCE = "reference"


def get_reference_logprobs(
    context: Context, inputs: Mapping[str, Tensor], labels: Tensor
) -> Tensor:
    """The log-probability of each row's labelled tokens: computed before, or by the reference."""
    if "reference_logps" in inputs:
        return inputs["reference_logps"]
    with torch.no_grad():
        return get_token_logprobs(context.frozen[REFERENCE], inputs, labels).sum(1)
