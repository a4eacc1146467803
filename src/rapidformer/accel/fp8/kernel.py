"""Triton kernels between the fp8 products of a gated MLP; import it only if Triton is installed.

They read ``gate`` and ``up`` twice, once to find the largest value and once to round: writing the
values in between to memory would take longer than computing them again. In Triton, rounding to fp8
saturates, and NaN stays NaN. Tensors must be contiguous, and their sizes multiples of 16.
"""

# ruff: noqa: ANN001, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from rapidformer.accel.fp8.product import PART
from rapidformer.compat.triton import on_device

LINE = (PART, 4)
"""Elements and warps of a program that reads a tensor from start to end."""
TILE = (64, 128, 8)
"""Rows, columns and warps of a program that also writes its tile transposed."""
_KINDS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def find_largest(gate: Tensor, up: Tensor) -> Tensor:
    """The largest absolute values of ``silu(gate) * up``, one per program."""
    block, warps = LINE
    programs = triton.cdiv(gate.numel(), block)
    found = torch.empty(programs, dtype=torch.float32, device=gate.device)
    with on_device(gate.device):
        _find_largest[(programs,)](gate, up, found, gate.numel(), block=block, num_warps=warps)
    return found


def find_largest_gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> Tensor:
    """The largest absolute values of the gradients of ``gate`` and ``up``: [2, programs]."""
    block, warps = LINE
    programs = triton.cdiv(gate.numel(), block)
    found = torch.empty(2, programs, dtype=torch.float32, device=gate.device)
    with on_device(gate.device):
        _find_largest_gradients[(programs,)](
            gate, up, gradient, found, gate.numel(), programs, block=block, num_warps=warps
        )
    return found


def round_product(gate: Tensor, up: Tensor, scale: Tensor, output: Tensor) -> None:
    """Fill ``output`` with ``silu(gate) * up / scale``."""
    block, warps = LINE
    with on_device(gate.device):
        _round_product[(triton.cdiv(gate.numel(), block),)](
            gate, up, scale, output, gate.numel(), block=block, num_warps=warps
        )


def round_gradients(
    gate: Tensor, up: Tensor, gradient: Tensor, scales: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Fill the outputs: gradients of gate and up, both also transposed, the product transposed."""
    to_gate, to_gate_transposed, to_up, to_up_transposed, product = outputs
    with on_device(gate.device):
        _round_gradients[_get_grid(gate)](
            gate, up, gradient, *scales,
            to_gate, _get_words(to_gate_transposed), to_up, _get_words(to_up_transposed),
            _get_words(product), *gate.shape,
            kind=_KINDS[product.dtype], block_r=TILE[0], block_c=TILE[1], num_warps=TILE[2],
        )  # fmt: skip


def transpose(tensor: Tensor, output: Tensor) -> None:
    """Fill ``output`` with the transposed matrix."""
    with on_device(tensor.device):
        _transpose[_get_grid(tensor)](
            tensor.view(torch.uint8), _get_words(output), *tensor.shape,
            block_r=TILE[0], block_c=TILE[1], num_warps=TILE[2],
        )  # fmt: skip


def _get_grid(tensor: Tensor) -> tuple[int, int]:
    rows, columns = tensor.shape
    return triton.cdiv(columns, TILE[1]), triton.cdiv(rows, TILE[0])


def _get_words(transposed: Tensor) -> Tensor:
    """A transposed tensor as 32-bit words: each has four rows of the original."""
    return transposed.view(torch.uint32)


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _differentiate(gate, up, gradient):  # type: ignore[no-untyped-def]
    sigmoid = _sigmoid(gate)
    product = gate * sigmoid
    to_gate = gradient * up * (sigmoid + product * (1.0 - sigmoid))
    return to_gate, gradient * product, product * up


@triton.jit  # type: ignore[untyped-decorator]
def _find_line(count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where this program's elements start, their places from there, and which of them exist."""
    # Only the start may need 64 bits.
    start = tl.program_id(0).to(tl.int64) * block
    places = tl.arange(0, block)
    return start, places, places < tl.minimum(count - start, block).to(tl.int32)


@triton.jit
def _load_line(tensor, start, places, mask):  # type: ignore[no-untyped-def]
    return tl.load(tensor + start + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _find_largest(gate, up, found, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    start, places, mask = _find_line(count, block)
    g = _load_line(gate, start, places, mask)
    u = _load_line(up, start, places, mask)
    tl.store(found + tl.program_id(0), tl.max(tl.abs(g * _sigmoid(g) * u), 0))


@triton.jit(do_not_specialize=("programs",))  # type: ignore[untyped-decorator]
def _find_largest_gradients(  # type: ignore[no-untyped-def]
    gate, up, gradient, found, count, programs, block: tl.constexpr
):
    start, places, mask = _find_line(count, block)
    g = _load_line(gate, start, places, mask)
    u = _load_line(up, start, places, mask)
    d = _load_line(gradient, start, places, mask)
    to_gate, to_up, _ = _differentiate(g, u, d)
    found += tl.program_id(0)
    tl.store(found, tl.max(tl.abs(to_gate), 0))
    tl.store(found + programs, tl.max(tl.abs(to_up), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _round_product(  # type: ignore[no-untyped-def]
    gate, up, scale, output, count, block: tl.constexpr
):
    start, places, mask = _find_line(count, block)
    g = _load_line(gate, start, places, mask)
    u = _load_line(up, start, places, mask)
    value = g * _sigmoid(g) * u * (1.0 / tl.load(scale))
    tl.store(output + start + places, value.to(output.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _find_tile(rows, columns, block_r: tl.constexpr, block_c: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's start and the offsets of every fourth row; the same transposed; the mask."""
    # A fourth of the rows, in a form that shows that it is a multiple of 4: a kernel that is not
    # compiled for the number of rows, which may change with every batch, still writes 4 words.
    quarter = rows // 16 * 4
    row = tl.program_id(1) * (block_r // 4)
    column = tl.program_id(0) * block_c
    r = tl.arange(0, block_r // 4)[:, None]
    c = tl.arange(0, block_c)[None, :]
    # Offsets within a tile fit in 32 bits; its start may not.
    start = 4 * row.to(tl.int64) * columns + column
    start_in_words = column.to(tl.int64) * quarter + row
    mask = (r < quarter - row) & (c < columns - column)
    return start, 4 * r * columns + c, start_in_words, c * quarter + r, mask


@triton.jit
def _load(tensor, step, mask):  # type: ignore[no-untyped-def]
    """Four adjacent rows, ``step`` elements apart, in fp32."""
    a = tl.load(tensor, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(tensor + step, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(tensor + 2 * step, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(tensor + 3 * step, mask=mask, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _store_rows(output, step, mask, a, b, c, d, factor):  # type: ignore[no-untyped-def]
    kind: tl.constexpr = output.dtype.element_ty
    tl.store(output, (a * factor).to(kind), mask=mask)
    tl.store(output + step, (b * factor).to(kind), mask=mask)
    tl.store(output + 2 * step, (c * factor).to(kind), mask=mask)
    tl.store(output + 3 * step, (d * factor).to(kind), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store_words(output, mask, a, b, c, d, factor, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the bytes of four rows as words of columns."""
    a = (a * factor).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32)
    b = (b * factor).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32)
    c = (c * factor).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32)
    d = (d * factor).to(kind).to(tl.uint8, bitcast=True).to(tl.uint32)
    tl.store(output, a | (b << 8) | (c << 16) | (d << 24), mask=mask)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def _round_gradients(  # type: ignore[no-untyped-def]
    gate, up, gradient, product_scale, gate_scale, up_scale,
    to_gate, to_gate_words, to_up, to_up_words, product_words, rows, columns,
    kind: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    start, places, start_in_words, words, mask = _find_tile(rows, columns, block_r, block_c)
    g0, g1, g2, g3 = _load(gate + start + places, columns, mask)
    u0, u1, u2, u3 = _load(up + start + places, columns, mask)
    d0, d1, d2, d3 = _load(gradient + start + places, columns, mask)
    g_factor = 1.0 / tl.load(gate_scale)
    u_factor = 1.0 / tl.load(up_scale)
    p_factor = 1.0 / tl.load(product_scale)
    # Loaded a second time, so that words are rounded separately: ptxas 12.8 mixes up bytes that are
    # stored both in a row and in a word.
    g_again = 1.0 / tl.load(gate_scale, volatile=True)
    u_again = 1.0 / tl.load(up_scale, volatile=True)
    g0, u0, p0 = _differentiate(g0, u0, d0)
    g1, u1, p1 = _differentiate(g1, u1, d1)
    g2, u2, p2 = _differentiate(g2, u2, d2)
    g3, u3, p3 = _differentiate(g3, u3, d3)
    _store_rows(to_gate + start + places, columns, mask, g0, g1, g2, g3, g_factor)
    _store_rows(to_up + start + places, columns, mask, u0, u1, u2, u3, u_factor)
    backward: tl.constexpr = to_gate.dtype.element_ty
    words += start_in_words
    _store_words(to_gate_words + words, mask, g0, g1, g2, g3, g_again, backward)
    _store_words(to_up_words + words, mask, u0, u1, u2, u3, u_again, backward)
    _store_words(product_words + words, mask, p0, p1, p2, p3, p_factor, kind)


@triton.jit(do_not_specialize=("rows",))  # type: ignore[untyped-decorator]
def _transpose(  # type: ignore[no-untyped-def]
    tensor, output, rows, columns, block_r: tl.constexpr, block_c: tl.constexpr
):
    start, places, start_in_words, words, mask = _find_tile(rows, columns, block_r, block_c)
    tensor += start + places
    a = tl.load(tensor, mask=mask, other=0).to(tl.uint32)
    b = tl.load(tensor + columns, mask=mask, other=0).to(tl.uint32)
    c = tl.load(tensor + 2 * columns, mask=mask, other=0).to(tl.uint32)
    d = tl.load(tensor + 3 * columns, mask=mask, other=0).to(tl.uint32)
    value = a | (b << 8) | (c << 16) | (d << 24)
    tl.store(output + start_in_words + words, value, mask=mask)
