"""Choose which calls of transformers' ``sdpa`` attention run in the kernel for a learned bias.

These are calls in a 16-bit training step on a GPU whose position bias needs a gradient. torch's
fast kernels cannot compute that gradient; its memory-efficient kernel can, but was written for
Ampere. Every other call is passed on unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.attention.learned_bias.call import ALIGNMENT
from rapidformer.accel.attention.learned_bias.operator import attend
from rapidformer.compat.triton import has_triton, works

_DEVICE = "cuda"
"""Tests without a GPU replace it."""
SIZES = (16, 32, 64, 128)
"""Head sizes that the kernel takes."""
_LARGEST = 2**31
"""The kernel computes offsets within a head in 32 bits."""


def fits(device: torch.device) -> bool:
    """Whether a GPU has as much shared memory as Hopper: the kernel's tiles need it."""
    return has_triton(device) and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def can_run(device: torch.device) -> bool:
    """Whether the kernel works on a device. It is tried once; a warning says why it does not."""
    trial = functools.partial(_try, device)
    return fits(device) and works("attention with a learned bias", trial)


def _try(device: torch.device) -> None:
    """Run both passes on equal scores. Without dropout, so that no random number is drawn."""
    query, key, value = (
        torch.ones(2, 64, 2, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
        for _ in range(3)
    )
    bias = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device=device)
    leaves = [each.requires_grad_() for each in (query, key, value, bias)]
    with torch.enable_grad():
        output = attend(*leaves, dropout=0.0, scale=1.0, is_causal=False)
        gradients = torch.autograd.grad(output.sum(), leaves)
    for result, expected in zip((output.detach(), *gradients), (1, 0, 0, 1, 0), strict=True):
        error = float((result - expected).abs().max())
        if not error < 0.01:
            raise RuntimeError(f"a result is off by {error:g}")


def build_attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function for transformers' interface; ``plain`` runs all other calls."""

    @functools.wraps(plain)
    def attend_with_bias(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        bias: Any = options.get("position_bias")
        dropout = options.get("dropout", 0.0)
        # As transformers treats a call without a mask.
        asked = options.get("is_causal")
        asked = getattr(module, "is_causal", True) if asked is None else asked
        is_causal = attention_mask is None and bool(asked)
        is_plain = bias is None or dropout >= 1 or (is_causal and query.shape[2] != key.shape[2])
        is_plain = is_plain or options.get("cache") is not None  # has more keys than these
        if is_plain or not suits(query, key, value, bias):
            return plain(module, query, key, value, attention_mask, **options)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if attention_mask is not None and not _is_plain_mask(attention_mask, key.shape[2]):
            # As transformers does for torch's attention.
            is_bool, lowest = attention_mask.dtype == torch.bool, torch.finfo(query.dtype).min
            mask, attention_mask = attention_mask, None
            bias = torch.where(mask, bias, lowest) if is_bool else bias + mask
        bias = bias.to(query.dtype).contiguous()
        output = attend(
            query, key, value, bias, attention_mask,
            dropout=dropout, scale=scale, is_causal=is_causal,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None

    return attend_with_bias


def suits(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> bool:
    """Whether the kernel can compute this call, and its bias needs a gradient."""
    if not (query.device.type == _DEVICE and bias.requires_grad and torch.is_grad_enabled()):
        return False
    parts = (query, key, value)
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    return (
        all(type(part) is Tensor for part in (*parts, bias))  # not split over ranks
        and query.dtype in (torch.bfloat16, torch.float16)
        and all(part.dtype == query.dtype and part.stride(-1) == 1 for part in parts)
        and size in SIZES
        and key.shape == value.shape == (batch, heads, keys, size)
        and bias.dim() == 4
        and bias.shape[0] in (1, batch)
        and bias.shape[1] in (1, heads)
        and bias.shape[2:] == (queries, keys)
        and queries * (keys + ALIGNMENT) < _LARGEST
        and (queries + keys) * heads * size < _LARGEST
        and all(part.shape[2] * part.stride(2) < _LARGEST for part in parts)
    )


def _is_plain_mask(mask: Tensor, keys: int) -> bool:
    """Whether the kernel can take the mask as it is; otherwise it is merged into the bias."""
    is_wide = mask.dim() == 4 and mask.shape[-1] == keys and mask.stride(-1) == 1
    return is_wide and mask.dtype == torch.bool
