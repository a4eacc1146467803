"""Attention with a learned bias as torch operators, forward and backward.

torch.compile does not trace into them, so a block stays one graph and does not recompute attention
in its backward pass. Dropout is drawn beforehand, one bit per weight, and read by both passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.attention.learned_bias.call import (
    Call,
    allocate_kept,
    allocate_like,
    allocate_output,
)
from rapidformer.compat.triton import on_device

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? seen, Tensor? kept"
_OPTIONS = "float dropout, float scale, bool is_causal"


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, seen: Tensor | None = None, *,
    dropout: float, scale: float, is_causal: bool,
) -> Tensor:  # fmt: skip
    """[batch, heads, tokens, size] -> the same shape.

    ``seen`` is a mask, False for keys that a query must not see. Both it and the bias may have a
    batch dimension or a head dimension of 1; the mask also a query dimension of 1.
    """
    kept = None
    if dropout:
        batch, heads, queries, _ = query.shape
        # From the device's generator, as CUDA graphs, recomputation and resuming expect.
        seed = torch.randint(2**31 - 1, (1,), device=query.device)
        kept = _draw(seed, batch * heads * queries, key.shape[2], dropout)
    return _attend(query, key, value, bias, seen, kept, dropout, scale, is_causal)[0]


@torch.library.custom_op("rapidformer::draw_kept_weights", mutates_args=())
def _draw(seed: Tensor, rows: int, keys: int, dropout: float) -> Tensor:
    from rapidformer.accel.attention.learned_bias.launch import draw

    with on_device(seed.device):
        return draw(seed, rows, keys, dropout)


@_draw.register_fake
def _(seed: Tensor, rows: int, keys: int, dropout: float) -> Tensor:
    return allocate_kept(seed, rows, keys)


@torch.library.custom_op(
    "rapidformer::attend_with_bias",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    from rapidformer.accel.attention.learned_bias import forward

    call = Call(*arguments)
    with on_device(call.query.device):
        return forward.attend(call)


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return allocate_output(query)


@torch.library.custom_op(
    "rapidformer::attend_with_bias_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor output, Tensor statistics, {_TENSORS}, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    gradient: Tensor, output: Tensor, statistics: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from rapidformer.accel.attention.learned_bias import backward

    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    with on_device(gradient.device):
        return backward.attend_backward(Call(*arguments), gradient, output, statistics)


@_attend_backward.register_fake
def _(
    gradient: Tensor, output: Tensor, statistics: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, bias = arguments[:4]
    like = allocate_like(query), allocate_like(key), allocate_like(value)
    return (*like, bias.new_empty(bias.shape))


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout, scale, is_causal = inputs
    ctx.options = (dropout, scale, is_causal)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _run_backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 9
    return (*_attend_backward(gradient, *ctx.saved_tensors, *ctx.options), *(None,) * 5)


_attend.register_autograd(_run_backward, setup_context=_set_up)
