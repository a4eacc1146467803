"""FlagAI's ``metric_methods``: functions of predictions and labels, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

MetricMethod = Sequence[Any]
"""``[name, function]``; ``function(predictions, labels, meta=..., tokenizer=...)``."""


def compute_methods(
    methods: Sequence[MetricMethod], predictions: Any, labels: Any, tokenizer: Any
) -> dict[str, float]:
    """Every metric by its name, over the whole of the data.

    One prediction a row comes as one tensor. Rows of tokens come as a list with a tensor of ids for
    each, since their lengths differ.
    """
    if not methods or predictions is None or labels is None:
        return {}
    guesses, truths = _split(predictions), _split(labels)
    if guesses[0].dim() == 0:
        joined: Any = torch.stack(guesses), torch.stack(truths)
    else:
        joined = guesses, truths
    return {
        str(name): float(_call(function, *joined, tokenizer=tokenizer, meta=None))
        for name, function in methods
    }


def _split(batches: Any) -> list[torch.Tensor]:
    return [row for batch in batches for row in torch.as_tensor(batch)]


def _call(function: Callable[..., Any], *values: Any, **extra: Any) -> Any:
    """Not every function takes the meta data and the tokenizer: FlagAI's own do not."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {name: value for name, value in extra.items() if takes_any or name in parameters}
    return function(*values, **taken)
