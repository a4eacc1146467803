"""What is known of torch's operations, for tensors of which only the real tokens exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FOLLOWED: dict[Any, Callable[..., Any]] = {}
"""Operations that need no padding. Each returns NotImplemented if it does need it."""
FOLLOWED_PAIRS: dict[Any, Callable[..., Any]] = {}
"""The same for those of two operands, whichever of them lacks padding."""

SHAPES = {
    Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.storage_offset,
    Tensor.get_device, Tensor.nelement, Tensor.ndimension, Tensor.is_complex, Tensor.is_signed,
    *(
        getattr(Tensor, name).__get__
        for name in ("is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes")
    ),
}  # fmt: skip
"""What a tensor on the meta device knows as well."""
EFFECTS = {
    Tensor.backward, Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_,
    Tensor.__setitem__, Tensor.__deepcopy__, torch.autograd.backward, torch.autograd.grad,
    *(getattr(getattr(Tensor, n), k) for n in ("grad", "data") for k in ("__get__", "__set__")),
}  # fmt: skip
"""Operations that do more than return a new tensor; so do those named like ``add_``."""

HIDE_NAN = {
    getattr(place, name)
    for name in (
        "nan_to_num", "nansum", "nanmean", "nanmedian", "nanquantile", "fmax", "fmin", "sign",
        "sgn", "heaviside", "copysign", "histc", "histogram", "histogramdd", "bernoulli", "msort",
        "renorm", "cdist", "multinomial", "poisson", "binary_cross_entropy", "multi_margin_loss",
        "multilabel_margin_loss", "unique", "unique_consecutive", "igamma", "igammac", "gammainc",
        # Fused attention on a CPU computes some rows of NaN as if they were zeros.
        "gammaincc", "zeta", "scaled_dot_product_attention", "multi_head_attention_forward",
        *(name for name in dir(torch.special) if "_polynomial_" in name),
    )
    for place in (torch, Tensor, torch.nn.functional, torch.special)
    if hasattr(place, name)
}  # fmt: skip
"""Operations whose result may be a number although they have read NaN, or that refuse it."""


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation changes one of its arguments."""
    name = str(getattr(func, "__name__", ""))
    is_named_so = name.endswith("_") and not name.endswith("__")
    is_operator = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return is_named_so or is_operator or bool(kwargs.get("inplace")) or "out" in kwargs
