"""Attention within rows on a CPU, in fp32 with dropout, which torch's fused kernel does not take.

All rows of a call are one node of autograd: as a node for each product of each row, autograd and
the copies between them took as long as the products. Whether a weight is kept is one byte.

If torch has no MKL, as on ARM, a batched product whose second factor is transposed takes five times
as long as one with a contiguous copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rapidformer.accel.unpad.dropout import draw_kept, get_factor
from rapidformer.accel.unpad.row_attention import repeat_heads
from rapidformer.compat.torch_dispatch import differentiate_softmax

Lengths = tuple[Sequence[int], Sequence[int]]
"""Of the rows of queries, and of the rows of keys."""


def suits(query: Tensor, dropout: float) -> bool:
    """Whether torch's own attention would be slower. Without dropout it is a fused kernel."""
    is_fp32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return 0 < dropout < 1 and is_fp32 and query.device.type == "cpu"


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths,
    dropout: float, scale: float | None, *, is_causal: bool,
) -> Tensor:  # fmt: skip
    """[heads, tokens, size] -> [tokens, heads, size]; within a row, full or causal."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = repeat_heads(key, query, 0), repeat_heads(value, query, 0)
    attended: Tensor = _Attention.apply(query, key, value, lengths, dropout, scale, is_causal)[0]
    return attended


class _Attention(Function):
    generate_vmap_rule = True  # with setup_context, this lets torch.func differentiate a model

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, lengths: Lengths,
        dropout: float, scale: float, is_causal: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The output, and what is kept for the backward pass."""
        weights = _compute_weights(query, key, lengths, scale, is_causal)
        is_kept = draw_kept(sum(each.numel() for each in weights), dropout)
        values = (value * get_factor(dropout)).split(lengths[1], 1)
        kept = _lay_out(is_kept, weights)
        attended = [
            (each * its_kept).bmm(its_value).transpose(0, 1)
            for each, its_kept, its_value in zip(weights, kept, values, strict=True)
        ]
        return torch.cat(attended), is_kept, *weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        query, key, value, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros as large as all weights
        ctx.save_for_backward(query, key, value, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        query, key, value, is_kept, *weights = ctx.saved_tensors
        (lengths, key_lengths), dropout, scale, is_causal = ctx.options
        if torch.is_grad_enabled():  # to be differentiated once more: in a gradient penalty
            weights = _compute_weights(query, key, ctx.options[0], scale, is_causal)
        factor, found = get_factor(dropout), []
        rows = zip(
            gradient.transpose(0, 1).split(lengths, 1), query.split(lengths, 1),
            key.split(key_lengths, 1), (value * factor).split(key_lengths, 1),
            weights, _lay_out(is_kept, weights), strict=True,
        )  # fmt: skip
        for of_output, its_query, its_key, its_value, each, kept in rows:
            of_value = (each * kept).transpose(1, 2).bmm(of_output)
            of_scores = differentiate_softmax(of_output.bmm(_turn(its_value)) * kept, each)
            of_key = of_scores.transpose(1, 2).bmm(its_query)
            found.append((of_scores.bmm(its_key), of_key, of_value))
        of_query, of_key, of_value = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return of_query * scale, of_key * scale, of_value * factor, None, None, None, None


def _compute_weights(
    query: Tensor, key: Tensor, lengths: Lengths, scale: float, is_causal: bool
) -> list[Tensor]:
    """The softmax of each row: [heads, queries, keys]."""
    rows = zip((query * scale).split(lengths[0], 1), key.split(lengths[1], 1), strict=True)
    scores = (its_query.bmm(_turn(its_key)) for its_query, its_key in rows)
    return [(_hide_later(each) if is_causal else each).softmax(-1) for each in scores]


def _hide_later(scores: Tensor) -> Tensor:
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu_(1)
    return scores.masked_fill(is_later, float("-inf"))


def _turn(matrices: Tensor) -> Tensor:
    """Transposed, as a second factor."""
    turned = matrices.transpose(1, 2)
    return turned if torch.backends.mkl.is_available() else turned.contiguous()


def _lay_out(is_kept: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """1 for each weight that is kept, and 0 for the others."""
    parts = is_kept.to(weights[0].dtype).split([each.numel() for each in weights])
    return [part.view(each.shape) for part, each in zip(parts, weights, strict=True)]
