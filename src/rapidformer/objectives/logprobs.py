"""Log-probabilities of labelled tokens, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional


def get_token_logprobs(
    model: Any,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    is_shifted: bool = True,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probability of each labelled token given those before it; 0 where the label is -100.

    As large as ``labels``. ``is_shifted``: position i predicts token i + 1, as in a decoder, so the
    first token of a row has no prediction. ``temperature`` divides the logits.
    """
    logits = model(**inputs).logits
    if is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float() / temperature,
        labels.flatten(),
        ignore_index=-100,
        reduction="none",
    )
    logprobs = -losses.view(labels.shape)
    return functional.pad(logprobs, (1, 0)) if is_shifted else logprobs
