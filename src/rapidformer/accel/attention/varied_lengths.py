"""Keep cuDNN out of attention whose lengths differ from batch to batch.

cuDNN prepares a plan for every new combination of sizes, which takes longer than a step of a small
model. Rows of a fixed length are nearly always multiples of 64, and rows padded to the longest of a
batch rarely are. So for all other lengths, cuDNN comes after torch's own fused kernels.

The rule depends on a call's sizes alone, so a resumed run and a recomputed block choose the same
kernels. Compiled blocks choose when they are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
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
_MULTIPLE = 64
"""Lengths that are multiples of this count as fixed."""


def build_attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' attention function ``plain``, following the rule."""

    @functools.wraps(plain)
    def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        # A compiled block chooses once for all sizes: ``kernel_scope.choose_for_all_sizes``.
        if torch.compiler.is_compiling() or not (
            query.shape[2] % _MULTIPLE or key.shape[2] % _MULTIPLE
        ):
            return plain(module, query, key, *args, **options)
        with use_order():
            return plain(module, query, key, *args, **options)

    return attend


def use_order() -> AbstractContextManager[None]:
    """Inside, cuDNN comes after torch's own fused kernels."""
    order: AbstractContextManager[None] = attention.sdpa_kernel(_ORDER, set_priority=True)
    return order
