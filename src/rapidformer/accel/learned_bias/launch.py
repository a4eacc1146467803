"""What the kernels share: how they take tensors, and which tile a program works on.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN201 - Triton would read annotations as part of the kernel
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.learned_bias.call import Call
from rapidformer.accel.learned_bias.dropout import get_kept_scale


class Strided(NamedTuple):
    """A tensor [batch, heads, rows, columns] with adjacent columns, and its other strides."""

    start: Any
    """The tensor; in a kernel, its address."""
    batch: int
    head: int
    row: int


class Lengths(NamedTuple):
    """The lengths of a call, apart from the head size, for which kernels are compiled."""

    batch: int
    heads: int
    queries: int
    keys: int


class Tile(NamedTuple):
    """How many queries and keys a program works on at once, and with how many warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Arguments(NamedTuple):
    """A call, as the kernels of both passes take it."""

    query: Strided
    key: Strided
    value: Strided
    bias: Strided
    seen: Strided | None
    kept: Strided | None
    lengths: Lengths
    scale: float
    kept_scale: float
    lowest: float
    """The bias of hidden keys, as in transformers."""


def get_arguments(call: Call) -> Arguments:
    """The tensors, lengths and factors of a call."""
    batch, heads, queries, _ = call.query.shape
    lengths = Lengths(batch, heads, queries, call.keys)
    seen, kept = call.seen, call.kept
    return Arguments(
        query=get_strided(call.query),
        key=get_strided(call.key),
        value=get_strided(call.value),
        bias=_get_shared(call.bias),
        seen=None if seen is None else _get_shared(seen.view(torch.uint8)),
        kept=None if kept is None else get_strided(kept.view(*lengths[:3], -1)),
        lengths=lengths,
        scale=call.scale,
        kept_scale=get_kept_scale(call.dropout),
        lowest=torch.finfo(call.query.dtype).min,
    )


def get_strided(tensor: Tensor) -> Strided:
    """A tensor for a kernel."""
    batch, head, row, _ = tensor.stride()
    return Strided(tensor, batch, head, row)


def _get_shared(tensor: Tensor) -> Strided:
    """A bias or mask for a kernel. A dimension of 1 is shared, so it gets a stride of 0."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    batch, head, row, _ = (0 if length == 1 else stride for length, stride in strides)
    return Strided(tensor, batch, head, row)


def launch(
    kernel: Any, tokens: int, block: int, call: Call, /, *arguments: Any, **options: Any
) -> None:
    """Run a kernel with one program for each block of tokens, in every head of every row."""
    batch, heads, _, size = call.query.shape
    kernel[(triton.cdiv(tokens, block) * batch * heads,)](*arguments, size=size, **options)


@triton.jit  # type: ignore[untyped-decorator]
def find_tile(tokens, batch, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first token of this program's tile, its row of the batch and its head.

    Programs that run at the same time read the same keys and values (tiles of a row) and the same
    bias (rows of a batch).
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, block)
    row = ((program // tiles) % batch).to(tl.int64)
    head = (program // tiles // batch).to(tl.int64)
    return (program % tiles) * block, row, head


@triton.jit  # type: ignore[untyped-decorator]
def find_head(tensor, row, head):  # type: ignore[no-untyped-def]
    """The address of one head of one row."""
    return tensor.start + (row * tensor.batch + head * tensor.head)
