"""Triton kernels that work on many tensors in one launch.

A launch has one program per chunk. ``chunks`` says which tensor a chunk is from and which of that
tensor's chunks it is; other tables hold every tensor's address. Everything that changes from step
to step is read from the device's memory, so that a CUDA graph can replay a launch.

Import this module only if Triton is installed; torch's CPU builds come without it.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - Triton would read annotations as part of the kernel
from __future__ import annotations

import torch
import triton
from triton import language as tl

from rapidformer.optim.multi_tensor import tables

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SETTINGS = tl.constexpr(tables.SETTINGS)
_NUMBERS = tl.constexpr(tables.NUMBERS)
_CUT = tl.constexpr(0xFFFF)
_GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def advance(  # type: ignore[no-untyped-def]
    steps, groups, settings, numbers, flag, count, block: tl.constexpr
):
    """Count the step of every tensor, and compute the numbers of its update."""
    tensor = tl.program_id(0) * block + tl.arange(0, block)
    mask = tensor < count
    pointer = tl.load(steps + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(pointer, mask=mask, other=0.0)
    step += tl.where(tl.load(flag) == 1.0, 0.0, 1.0)
    tl.store(pointer, step, mask=mask)
    row = settings + tl.load(groups + tensor, mask=mask, other=0) * _SETTINGS
    rate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    beta1 = tl.load(row + 1, mask=mask, other=0.0).to(tl.float32)
    beta2 = tl.load(row + 2, mask=mask, other=0.0).to(tl.float32)
    exact = step.to(tl.float64)
    power1 = tl.exp(exact * tl.load(row + 3, mask=mask, other=-1.0)).to(tl.float32)
    power2 = tl.exp(exact * tl.load(row + 4, mask=mask, other=-1.0)).to(tl.float32)
    epsilon = tl.load(row + 5, mask=mask, other=0.0).to(tl.float32)
    decay = tl.load(row + 6, mask=mask, other=0.0).to(tl.float32)
    penalty = tl.load(row + 7, mask=mask, other=0.0).to(tl.float32)
    out = numbers + tensor * _NUMBERS
    tl.store(out, tl.div_rn(rate, 1.0 - power1), mask=mask)
    tl.store(out + 1, beta1, mask=mask)
    tl.store(out + 2, 1.0 - beta1, mask=mask)
    tl.store(out + 3, beta2, mask=mask)
    tl.store(out + 4, 1.0 - beta2, mask=mask)
    tl.store(out + 5, tl.sqrt_rn(1.0 - power2), mask=mask)
    tl.store(out + 6, epsilon, mask=mask)
    tl.store(out + 7, rate * decay, mask=mask)
    tl.store(out + 8, penalty, mask=mask)
    tl.store(out + 9, step, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def update(  # type: ignore[no-untyped-def]
    chunks, rows, gradients, numbers, divisor, flag,
    weight_type: tl.constexpr, gradient_type: tl.constexpr, moment_type: tl.constexpr,
    rounds_randomly: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Update a chunk of a weight and its moments, from a row: three addresses and the size."""
    if tl.load(flag) == 1.0:
        return
    place = chunks + tl.program_id(0) * 2
    tensor = tl.load(place).to(tl.int64)
    start = tl.load(place + 1).to(tl.int64) * chunk
    row = rows + tensor * 4
    weight = tl.load(row)
    mean = tl.load(row + 1)
    square = tl.load(row + 2)
    size = tl.load(row + 3)
    gradient = tl.load(gradients + tensor)
    own = numbers + tensor * _NUMBERS
    # Read once: inside the loop, they might be affected by what it stores.
    values = (
        tl.load(divisor), tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3),
        tl.load(own + 4), tl.load(own + 5), tl.load(own + 6), tl.load(own + 7), tl.load(own + 8),
        tl.load(own + 9),
    )  # fmt: skip
    end = tl.minimum(start + chunk, size)
    pointers = (
        weight.to(tl.pointer_type(weight_type)), gradient.to(tl.pointer_type(gradient_type)),
        mean.to(tl.pointer_type(moment_type)), square.to(tl.pointer_type(moment_type)),
    )  # fmt: skip
    # Only accesses of 16 bytes reach the device's full bandwidth.
    if ((weight | gradient | mean | square | end) & 15) == 0:
        _update_chunk(pointers, start, end, values, rounds_randomly, chunk, block, True)
    else:
        _update_chunk(pointers, start, end, values, rounds_randomly, chunk, block, False)


@triton.jit  # type: ignore[untyped-decorator]
def _update_chunk(  # type: ignore[no-untyped-def]
    pointers, start, end, values, rounds_randomly: tl.constexpr,
    chunk: tl.constexpr, block: tl.constexpr, is_aligned: tl.constexpr,
):  # fmt: skip
    weight, gradient, mean, square = pointers
    if is_aligned:
        end = _align(end)
    for offset in range(0, chunk, block):
        places = start + offset + tl.arange(0, block)
        weights = _shift(weight, places, is_aligned)
        gradients = _shift(gradient, places, is_aligned)
        means = _shift(mean, places, is_aligned)
        squares = _shift(square, places, is_aligned)
        _update_block(weights, gradients, means, squares, places < end, values, rounds_randomly)


@triton.jit  # type: ignore[untyped-decorator]
def _update_block(  # type: ignore[no-untyped-def]
    weights, gradients, means, squares, mask, values, rounds_randomly: tl.constexpr
):
    divisor, rate, beta1, new1, beta2, new2, correction, epsilon, decay, penalty, step = values
    w = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gradients, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(means, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(squares, mask=mask, other=0.0).to(tl.float32)
    # Each rounding is torch's: left to itself, Triton would round roots and quotients less exactly,
    # and choose which products to fuse with sums.
    g = tl.fma(w, penalty, tl.div_rn(g, divisor))
    w = tl.fma(-decay, w, w)
    m = tl.fma(beta1, m, new1 * g)
    v = tl.fma(beta2, v, new2 * (g * g))
    root = tl.div_rn(tl.sqrt_rn(v), correction) + epsilon
    w -= tl.div_rn(rate * m, root)
    if rounds_randomly:
        salt = step.to(tl.uint32) * _GOLDEN
        m = _round_randomly(m, salt)
        v = _round_randomly(v, salt + 1)
    tl.store(weights, w.to(weights.dtype.element_ty), mask=mask)
    tl.store(means, m.to(means.dtype.element_ty), mask=mask)
    tl.store(squares, v.to(squares.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _shift(pointer, places, is_aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to these elements of a tensor; the compiler sees whether they are aligned."""
    if is_aligned:
        pointer = tl.multiple_of(_align(pointer.to(tl.int64)).to(pointer.dtype), 16)
    return pointer + places


@triton.jit
def _align(number):  # type: ignore[no-untyped-def]
    """A multiple of 16 that shows it; ``tl.multiple_of`` would count for unaligned tensors."""
    return number // 16 * 16


@triton.jit
def _round_randomly(value, salt):  # type: ignore[no-untyped-def]
    """``bf16_adamw.round_randomly``: fp32 values that bf16 holds exactly."""
    bits = value.to(tl.uint32, bitcast=True)
    mixed = bits + salt
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    rounded = (bits + (mixed & _CUT)) & 0xFFFF0000
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def square_chunk(  # type: ignore[no-untyped-def]
    chunks, addresses, sizes, partial, kind: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr
):
    """The sum of squares of one chunk, in fp32."""
    place = chunks + tl.program_id(0) * 2
    tensor = tl.load(place).to(tl.int64)
    start = tl.load(place + 1).to(tl.int64) * chunk
    address = tl.load(addresses + tensor)
    size = tl.load(sizes + tensor)
    end = tl.minimum(start + chunk, size)
    pointer = address.to(tl.pointer_type(kind))
    if ((address | end) & 15) == 0:
        total = _square_chunk(pointer, start, end, chunk, block, True)
    else:
        total = _square_chunk(pointer, start, end, chunk, block, False)
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _square_chunk(  # type: ignore[no-untyped-def]
    pointer, start, end, chunk: tl.constexpr, block: tl.constexpr, is_aligned: tl.constexpr
):
    if is_aligned:
        end = _align(end)
    sums = tl.zeros((block,), tl.float32)
    for offset in range(0, chunk, block):
        places = start + offset + tl.arange(0, block)
        pointers = _shift(pointer, places, is_aligned)
        values = tl.load(pointers, mask=places < end, other=0.0).to(tl.float32)
        sums += values * values
    return sums


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def add_up(partial, total, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all partial sums in fp64, by a single program: always in the same order."""
    sums = tl.zeros((block,), tl.float64)
    for start in range(0, count, block):
        places = start + tl.arange(0, block)
        sums += tl.load(partial + places, mask=places < count, other=0.0).to(tl.float64)
    tl.store(total, tl.sum(sums, 0))


@triton.jit
def write_addresses(table, addresses):  # type: ignore[no-untyped-def]
    """Write addresses given as arguments, plus one: Triton specializes for multiples of 16."""
    for number in tl.static_range(len(addresses)):
        tl.store(table + number, addresses[number] - 1)
