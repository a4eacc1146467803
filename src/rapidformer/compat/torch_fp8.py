"""Matrix products of fp8 tensors, each with one scale."""

from __future__ import annotations

import torch
from torch import Tensor

PRIVATE_NAMES = {
    "torch._scaled_mm": "matrix products in fp8",
    "torch.ops.aten._scaled_mm": "what selective recompute keeps",
}
SCALED_PRODUCT = torch.ops.aten._scaled_mm.default
"""The product as autograd sees it."""


def multiply_scaled(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    *,
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """``(left * left_scale) @ (right * right_scale)``; ``is_fast`` sums with fewer bits.

    The kernel wants rows of ``left`` and columns of ``right`` contiguous, and 16 divides its inner
    and right sizes. On a CPU the product is computed in fp32: for tests of numerics.
    """
    if left.device.type != "cuda":
        with torch.autocast(left.device.type, enabled=False):
            product = left.float() @ right.float() * (left_scale * right_scale)
        return product.to(dtype)
    return torch._scaled_mm(
        left.contiguous(),
        right.t().contiguous().t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )
