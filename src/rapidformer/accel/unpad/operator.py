"""Attention row by row on a CPU, as one operator: what compiled blocks call.

torch.compile does not look inside, so a graph does not depend on the lengths of rows. Autograd
does not either: the backward pass is written out, and draws the same dropout from the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rapidformer.accel.unpad.masks import Window


def attend_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    dropout: float,
    window: Window,
    scale: float | None,
) -> Tensor:
    """[tokens, heads, size] -> the same."""
    seed = torch.randint(2**31, (1,)) if dropout else torch.zeros(1, dtype=torch.long)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _attend(query, key, value, ends, seed, dropout, *window, scale)
    return output


@torch.library.custom_op("rapidformer::attend_by_row", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    seed: Tensor,
    dropout: float,
    before: int,
    after: int,
    scale: float,
) -> Tensor:
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    key, value = _repeat(key, query), _repeat(value, query)
    masks = _draw(seed, dropout)
    for row in _iterate_rows(ends):
        weights = _compute_weights(query[row], key[row], before, after, scale)
        kept = next(masks)(weights)
        output[row] = torch.einsum("hqk,khd->qhd", (weights * kept).to(value.dtype), value[row])
    return output


@torch.library.custom_op("rapidformer::attend_by_row_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    seed: Tensor,
    dropout: float,
    before: int,
    after: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _repeat(key, query).float(), _repeat(value, query).float()
    of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    of_key, of_value = torch.empty_like(keys), torch.empty_like(values)
    masks = _draw(seed, dropout)
    for row in _iterate_rows(ends):
        mine = gradient[row].float()
        weights = _compute_weights(query[row], keys[row], before, after, scale)
        kept = next(masks)(weights)
        of_value[row] = torch.einsum("hqk,qhd->khd", weights * kept, mine)
        of_weights = torch.einsum("qhd,khd->hqk", mine, values[row]) * kept
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        of_query[row] = torch.einsum("hqk,khd->qhd", of_scores, keys[row]).to(query.dtype)
        of_key[row] = torch.einsum("hqk,qhd->khd", of_scores, query[row].float())
    return of_query, _join(of_key, key), _join(of_value, value)


@_attend.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format)
        for each in (query, key, value)
    )


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _run_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = _attend_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return (*found, *[None] * 6)


_attend.register_autograd(_run_backward, setup_context=_set_up)


def _iterate_rows(ends: Tensor) -> Iterator[slice]:
    places = ends.tolist()
    return (slice(a, b) for a, b in pairwise(places) if b > a)


def _compute_weights(query: Tensor, key: Tensor, before: int, after: int, scale: float) -> Tensor:
    """The softmax of one row: [heads, tokens, tokens], in fp32."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    place = torch.arange(len(query))
    distance = place[None] - place[:, None]
    if before >= 0:
        scores = scores.masked_fill(distance < -before, float("-inf"))
    if after >= 0:
        scores = scores.masked_fill(distance > after, float("-inf"))
    return scores.softmax(-1)


def _draw(seed: Tensor, dropout: float) -> Iterator[Any]:
    """For each row in turn, a function from its weights to what dropout multiplies them by."""
    generator = torch.Generator().manual_seed(int(seed))
    while True:
        if dropout:
            yield (
                lambda weights: (
                    torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator)
                    / (1 - dropout)
                )
            )
        else:
            yield torch.ones_like


def _repeat(tensor: Tensor, query: Tensor) -> Tensor:
    """Key or value heads, as often as query heads share them."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _join(gradient: Tensor, like: Tensor) -> Tensor:
    """The sum over query heads that share a key or value head."""
    shape = (len(like), like.shape[1], -1, like.shape[2])
    return gradient.reshape(shape).sum(2).to(like.dtype)
