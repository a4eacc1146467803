"""Attention within all rows as one operator.

It is for compiled blocks on a CPU, and for short rows on a GPU (``short_rows.py``). torch.compile
does not trace into it, so a graph does not depend on the rows' lengths. Neither does autograd, so
the backward pass is written out; it draws the same dropout from the same seed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.attention.learned_bias.interface import SIZES, fits
from rapidformer.accel.unpad.dropout import draw_factors
from rapidformer.compat.triton import on_device, works

LONGEST_ON_GPU = 128
"""The longest row whose scores one program of a GPU can hold."""
HEADS_ON_GPU = SIZES


@functools.cache
def can_run_on_gpu(device: torch.device) -> bool:
    """Whether the kernel for short rows works there. It is tried once; a warning says why not."""
    return fits(device) and works("attention of short rows", functools.partial(_try, device))


def _try(device: torch.device) -> None:
    """Attend to equal keys, without dropout: no random number is drawn."""
    ones = torch.ones(3, 1, 64, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([0, 3], dtype=torch.int32, device=device)
    output = attend_by_row(
        ones, ones, ones, (ends, ends), 3, dropout=0.0, window=(-1, -1), scale=1.0
    )
    if not torch.equal(output, ones):
        raise RuntimeError(f"a result is off by {float((output - ones).abs().max()):g}")


def compile_with_dropout(device: torch.device) -> None:
    """Compile in the background what training with dropout needs of the kernels tried so far."""
    if device.type == "cuda" and can_run_on_gpu(device):
        from rapidformer.accel.unpad import short_rows

        short_rows.compile_with_dropout()


def attend_by_row(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor],
    longest: int, bias: Tensor | None = None, *, dropout: float, window: tuple[int, int],
    scale: float | None,
) -> Tensor:  # fmt: skip
    """[tokens, heads, size] within rows' ``ends``; ``bias`` is [1, heads, rows, keys] or larger.

    No row has more than ``longest`` tokens.
    """
    # From the device's generator, as CUDA graphs, recomputation and resuming expect.
    seed = query.new_zeros(1, dtype=torch.long)
    if dropout:
        seed = torch.randint(2**31, (1,), device=query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query, key, value, *ends, seed, bias, longest, dropout, *window, scale)


@torch.library.custom_op("rapidformer::attend_by_row", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, seed: Tensor,
    bias: Tensor | None, longest: int, dropout: float, before: int, after: int, scale: float,
) -> Tensor:  # fmt: skip
    output = query.new_empty(*query.shape[:2], value.shape[2])
    key, value = repeat_heads(key, query, 1), repeat_heads(value, query, 1)
    masks = _draw(seed, dropout)
    for row, other in _iterate_rows(ends, key_ends):
        weights = _compute_weights(query[row], key[other], bias, before, after, scale)
        kept = next(masks)(weights)
        output[row] = torch.einsum("hqk,khd->qhd", (weights * kept).to(value.dtype), value[other])
    return output


@torch.library.custom_op("rapidformer::attend_by_row_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor,
    seed: Tensor, bias: Tensor | None, longest: int, dropout: float, before: int, after: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    keys, values = repeat_heads(key, query, 1).float(), repeat_heads(value, query, 1).float()
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    # Zeros, not empty: a row of keys may have no queries.
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    of_bias = query.new_zeros(0 if bias is None else bias.shape, dtype=torch.float32)
    masks = _draw(seed, dropout)
    for row, other in _iterate_rows(ends, key_ends):
        mine = gradient[row].float()
        weights = _compute_weights(query[row], keys[other], bias, before, after, scale)
        kept = next(masks)(weights)
        of_value[other] = torch.einsum("hqk,qhd->khd", weights * kept, mine)
        of_weights = _multiply(mine, values[other]) * kept
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        if bias is not None:
            of_bias[0, :, : len(mine), : of_scores.shape[2]] += of_scores
        of_scores = of_scores * scale
        of_query[row] = torch.einsum("hqk,khd->qhd", of_scores, keys[other]).to(query.dtype)
        of_key[other] = torch.einsum("hqk,qhd->khd", of_scores, query[row].float())
    of_bias = of_bias if bias is None else of_bias.to(bias.dtype)
    return of_query, _join(of_key, key), _join(of_value, value), of_bias


@_attend.register_kernel("cuda")
def _(query: Tensor, *arguments: Any) -> Tensor:
    from rapidformer.accel.unpad import short_rows

    key, value, ends, key_ends, seed, _, *options = arguments
    with on_device(query.device):
        return short_rows.attend(query, key, value, ends, key_ends, seed, *options)


@_attend_backward.register_kernel("cuda")
def _(gradient: Tensor, query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from rapidformer.accel.unpad import short_rows

    key, value, ends, key_ends, seed, _, *options = arguments
    with on_device(query.device):
        gradients = short_rows.attend_backward(
            gradient, query, key, value, ends, key_ends, seed, *options
        )
    return (*gradients, query.new_zeros(0))


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Any:
    bias: Tensor | None = more[3]
    of_bias = query.new_zeros(0) if bias is None else torch.zeros_like(bias)
    found = (
        torch.empty_like(each, memory_format=torch.contiguous_format)
        for each in (query, key, value)
    )
    return (*found, of_bias)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, bias = inputs[:7]
    ctx.save_for_backward(*tensors, *([] if bias is None else [bias]))
    ctx.options = inputs[7:]


def _run_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: under recomputation, it can be read only once
    bias = saved[6] if len(saved) > 6 else None
    found: Any = _attend_backward(gradient, *saved[:6], bias, *ctx.options)
    of_bias = None if bias is None else found[3]
    return (*found[:3], None, None, None, of_bias, *[None] * 5)


_attend.register_autograd(_run_backward, setup_context=_set_up)


def _iterate_rows(ends: Tensor, key_ends: Tensor) -> Iterator[tuple[slice, slice]]:
    """Each row of queries that is not empty, with its row of keys."""
    pairs = zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    return ((slice(*row), slice(*other)) for row, other in pairs if row[1] > row[0])


def _compute_weights(
    query: Tensor, key: Tensor, bias: Tensor | None, before: int, after: int, scale: float
) -> Tensor:
    """The softmax of one row: [heads, queries, keys], in fp32."""
    scores = _multiply(query.float(), key.float()) * scale
    if bias is not None:
        scores += bias[0, :, : len(query), : len(key)]
    distance = torch.arange(len(key))[None] - torch.arange(len(query))[:, None]
    if before >= 0:
        scores = scores.masked_fill(distance < -before, float("-inf"))
    if after >= 0:
        scores = scores.masked_fill(distance > after, float("-inf"))
    return scores.softmax(-1)


def _multiply(queries: Tensor, keys: Tensor) -> Tensor:
    """[queries, heads, size], [keys, heads, size] -> [heads, queries, keys]."""
    return queries.transpose(0, 1).bmm(keys.permute(1, 2, 0).contiguous())


def _draw(seed: Tensor, dropout: float) -> Iterator[Any]:
    """For each row in turn, a function that returns the dropout factors of its weights."""
    generator = torch.Generator().manual_seed(int(seed))
    while True:
        if dropout:
            yield functools.partial(draw_factors, rate=dropout, generator=generator)
        else:
            yield torch.ones_like


def repeat_heads(tensor: Tensor, query: Tensor, dim: int) -> Tensor:
    """Repeat key or value heads for the query heads that share them."""
    times = query.shape[dim] // tensor.shape[dim]
    return tensor.repeat_interleave(times, dim) if times > 1 else tensor


def _join(gradient: Tensor, like: Tensor) -> Tensor:
    """The reverse of ``repeat_heads`` for gradients: sum over the query heads that share a head."""
    shape = (len(like), like.shape[1], -1, like.shape[2])
    return gradient.reshape(shape).sum(2).to(like.dtype)
