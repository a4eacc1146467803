"""Attention over lengths that differ from batch to batch: without cuDNN, which plans for each one.

cuDNN prepares a plan for every new combination of sizes, which takes longer than a step of a small
model. Rows of a fixed length are nearly always multiples of 64, and those that were padded to the
longest one rarely are. The rule depends on a call's sizes alone, so a resumed run chooses the same
kernels, and so does a block that is recomputed. Compiled blocks choose when they are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import SDPBackend

_ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
_FIXED = 64
_used: list[bool] = []
"""Not empty while the rule applies."""


@contextmanager
def avoid_plans() -> Iterator[None]:
    """Let ``sdpa`` attention, of every model in this process, follow the rule."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(plain)
    def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        # A compiled block chooses once for all sizes, see below.
        if torch.compiler.is_compiling() or not (query.shape[2] % _FIXED or key.shape[2] % _FIXED):
            return plain(module, query, key, *args, **options)
        with attention.sdpa_kernel(_ORDER, set_priority=True):
            return plain(module, query, key, *args, **options)

    AttentionInterface.register("sdpa", attend)
    _used.append(True)
    try:
        yield
    finally:
        _used.pop()
        AttentionInterface.register("sdpa", plain)


def choose_for_all_sizes() -> AbstractContextManager[None]:
    """Code that is compiled for all sizes inside follows the rule, if this run does."""
    if not _used:
        return nullcontext()
    order: AbstractContextManager[None] = attention.sdpa_kernel(_ORDER, set_priority=True)
    return order
