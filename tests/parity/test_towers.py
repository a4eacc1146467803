"""Models that see, trained on text: gradients of a bare loop, and towers that stay as they are."""

from __future__ import annotations

import numpy as np

from rapidformer.verification.trace import Trace
from tests.parity.harness import PIPELINE, SHORT, TENSOR, UNPADDED, Settings, check, under, zero
from tests.parity.limits import FIRST, SHARD_LIMITS, Limits

FAMILIES = ("qwen3_vl", "gemma3", "smolvlm", "llava", "mistral3")
ROUGH = Limits({**SHARD_LIMITS.all, "gradients": 5e-4}, {**FIRST, "gradients": 5e-4})
"""The gradients of Qwen 3.5's decays are as small as 1e-6, and round-off is large beside them."""


def check_towers(everyone: list[list[Trace]]) -> None:
    """No stage, shard or copy of a tower has changed by a bit."""
    for traces in everyone:
        found = 0
        for trace in traces:
            for name in trace.weights:
                if "vision" in name or "visual" in name:
                    assert np.array_equal(trace.weights[name], trace.start[name]), name
                    found += 1
        assert found > 10


def test_parity() -> None:
    accumulated: Settings = {"micro_batch_size": 1, **UNPADDED}
    check_towers(check(1, under(accumulated, *FAMILIES, "mllama"), SHARD_LIMITS))
    check_towers(check(1, under(accumulated, "qwen3_5"), ROUGH))


def test_parity_on_two_processes() -> None:
    """``idle-`` models are a user's own: nothing is frozen, and the tower has no gradients."""
    cases = [
        *under(zero(3), "qwen3_vl", "smolvlm", "mistral3", "idle-mllama", "llava-lora"),
        *under({}, "idle-llava", "qwen3_vl-lora"),
        *under({TENSOR: 2}, "qwen3_vl", rows=SHORT),
        *under({PIPELINE: 2}, "gemma3", rows=SHORT),
        *under({"context_parallel_size": 2}, "llava", rows=SHORT),
    ]
    check_towers(check(2, cases, SHARD_LIMITS))
