"""Fused attention of a form, which any kernel of torch may compute.

In 16 bits, a kernel takes the bias in 16 bits too, where scores have been in fp32. Softmax is the
same whatever is added to a whole row of scores, so the largest bias of each row becomes zero first:
then only biases far below it lose precision. This matters to ALiBi, whose numbers are large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.attention.kernel_scope import attend_fused
from rapidformer.accel.attention.own_code.form import ABSORBING, Form
from rapidformer.compat.transformers_models import changes_in_place
from rapidformer.errors import RapidformerError
from rapidformer.overlay import get_own_class

_LARGEST_HEAD, _MULTIPLE = 256, 8
"""Of head sizes that fused kernels take."""


def fits(size: int) -> bool:
    """Whether fused kernels take heads of this size."""
    return 0 < size <= _LARGEST_HEAD and size % _MULTIPLE == 0


def attend(weights: Form, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights times values: [*lead, queries, size of values]."""
    lead, bias = weights.lead, weights.bias
    query, key, value = (
        part.reshape(*lead, *part.shape[-2:]).to(dtype)
        for part in (weights.query, weights.key.transpose(-2, -1), value)
    )
    if bias is not None:
        bias = _round(bias, dtype)
    parts = (_join(query, lead), _join(key, lead), _join(value, lead))
    bias = None if bias is None else _join(bias, lead)
    attended = attend_fused(
        weights.module, *parts, bias, dropout=weights.dropout, scale=weights.scale
    )
    if torch.is_grad_enabled():
        attended = _Twice.apply(weights.scale, weights.dropout, attended, *parts, bias)
    if changes_in_place(get_own_class(weights.module)):
        attended = attended.clone()  # the kernel reads its result again in the backward pass
    return attended.reshape(*lead, *attended.shape[-2:])


def _join(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[batch, heads, *, *] of more or fewer leading dimensions."""
    if len(lead) == 1:
        return tensor.unsqueeze(1)
    # The heads are joined with all other dimensions but the first, along which masks differ least.
    if len(lead) > 2 and any(size != 1 for size in tensor.shape[1:-2]):
        tensor = tensor.expand(-1, *lead[1:], -1, -1)
    return tensor.flatten(1, -3)


def _round(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias as a kernel takes it."""
    if bias.dtype == dtype:
        return bias
    if torch.finfo(bias.dtype).eps < torch.finfo(dtype).eps:
        largest = bias.detach().amax(-1, keepdim=True)
        has_key = largest > ABSORBING
        # Where a row has none, scores remain absorbed, by numbers that are finite in bf16.
        factor = torch.where(has_key, 1.0, 0.99).to(bias.dtype)
        bias = torch.addcmul(-largest * has_key, bias, factor)
    return bias.to(dtype)


class _Twice(torch.autograd.Function):
    """Fused kernels have no second derivative: with ``create_graph``, the gradient is eager."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, dropout: float, attended: Tensor, query: Tensor, key: Tensor,
        value: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.scale, ctx.dropout = scale, dropout
        ctx.save_for_backward(query, key, value, bias)
        return attended.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return None, None, gradient, None, None, None, None
        if ctx.dropout:
            raise RapidformerError(
                "a gradient of a gradient through fused attention with dropout cannot be computed: "
                "turn the model's attention dropout off, or use --without own-attention-code."
            )
        query, key, value, bias = ctx.saved_tensors
        scores = query @ key.mT * ctx.scale
        scores = scores if bias is None else scores + bias
        dtype = torch.promote_types(value.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=dtype).to(value.dtype)
        inputs = [part for part in (query, key, value, bias) if part is not None]
        wanted = [part for part in inputs if part.requires_grad]
        found = iter(torch.autograd.grad(weights @ value, wanted, gradient, create_graph=True))
        gradients = [
            next(found) if part is not None and part.requires_grad else None
            for part in (query, key, value, bias)
        ]
        return None, None, None, *gradients
