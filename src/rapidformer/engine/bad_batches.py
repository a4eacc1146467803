"""How a batch with a bad loss is named in the log."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 64
"""Samples that a line of the log names; ``metrics.jsonl`` has all of them."""


def describe_bad_batch(reason: str, step: int, samples: Sequence[int]) -> str:
    """What is wrong at which step, and the numbers of the batch's samples in the data set."""
    if not samples:
        return f"{reason} at step {step}"
    named = ", ".join(str(number) for number in samples[:_MOST])
    more = f" and {len(samples) - _MOST} more" if len(samples) > _MOST else ""
    return f"{reason} at step {step} (samples {named}{more})"
