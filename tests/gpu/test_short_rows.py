"""Attention of short rows: the kernel against fp64, with and without dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapidformer.accel.attention.learned_bias import interface
from rapidformer.accel.unpad import row_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not interface.fits(torch.device("cuda")),
        reason="needs a CUDA GPU like Hopper, and Triton",
    ),
]
LENGTHS = [1, 7, 0, 32, 33, 64, 65, 100, 128]
FULL, CAUSAL = (-1, -1), (-1, 0)


def make(
    heads: int, key_heads: int, size: int, dtype: torch.dtype, keys: list[int] = LENGTHS
) -> tuple[list[Tensor], tuple[Tensor, Tensor], Tensor]:
    """Query, key and value, the ends of their rows, and the gradient of the output."""
    torch.manual_seed(0)
    tokens = [sum(LENGTHS), sum(keys), sum(keys)]
    shapes = zip(tokens, (heads, key_heads, key_heads), strict=True)
    drawn = [torch.randn(n, count, size, device="cuda").to(dtype) for n, count in shapes]
    ends = [
        torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32) for lengths in (LENGTHS, keys)
    ]
    gradient = torch.randn(drawn[0].shape, device="cuda").to(dtype)
    return [leaf.requires_grad_() for leaf in drawn], (ends[0], ends[1]), gradient


def attend(leaves: list[Tensor], ends: Any, gradient: Tensor, **options: Any) -> list[Tensor]:
    output = row_attention.attend_by_row(*leaves, ends, 128, scale=None, **options)
    return [output, *torch.autograd.grad(output, leaves, gradient)]


def compute_exactly(
    leaves: list[Tensor], ends: Any, gradient: Tensor, window: tuple[int, int],
    factors: list[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Output and gradients in fp64; ``factors`` are what dropout multiplies the weights by."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key, value = (tensor.transpose(0, 1) for tensor in wide)
    times = len(query) // len(key)
    key, value = (tensor.repeat_interleave(times, 0) for tensor in (key, value))
    rows = []
    bounds = [each.tolist() for each in ends]
    for row in range(len(bounds[0]) - 1):
        q, k = (slice(each[row], each[row + 1]) for each in bounds)
        scores = query[:, q] @ key[:, k].mT * query.shape[-1] ** -0.5
        distance = torch.arange(scores.shape[2])[None] - torch.arange(scores.shape[1])[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= distance < -window[0]
        if window[1] >= 0:
            hidden |= distance > window[1]
        weights = scores.masked_fill(hidden.cuda(), float("-inf")).softmax(-1)
        rows.append((weights if factors is None else weights * factors[row]) @ value[:, k])
    output = torch.cat(rows, 1).transpose(0, 1)
    return [output, *torch.autograd.grad(output, wide, gradient.double())]


def check(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for name, mine, exact in zip(("output", "q", "k", "v"), found, expected, strict=True):
        error = float((mine.detach().double() - exact.detach()).norm() / exact.detach().norm())
        assert error < torch.finfo(dtype).eps / 2, (name, error)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "dtype", "window"),
    [
        (12, 12, 64, torch.bfloat16, FULL),
        (8, 2, 32, torch.float16, CAUSAL),
        (4, 4, 128, torch.bfloat16, (9, 5)),
        (4, 1, 16, torch.bfloat16, FULL),
    ],
)
def test_values_and_gradients(
    heads: int, key_heads: int, size: int, dtype: torch.dtype, window: tuple[int, int]
) -> None:
    leaves, ends, gradient = make(heads, key_heads, size, dtype)
    found = attend(leaves, ends, gradient, dropout=0.0, window=window)
    check(found, compute_exactly(leaves, ends, gradient, window), dtype)
    again = attend(leaves, ends, gradient, dropout=0.0, window=window)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))


def test_rows_that_attend_to_others() -> None:
    """A row of queries may be longer or shorter than its keys, or have none at all."""
    keys = [3, 128, 17, 64, 5, 1, 90, 33, 2]
    leaves, ends, gradient = make(4, 4, 64, torch.bfloat16, keys)
    found = attend(leaves, ends, gradient, dropout=0.0, window=FULL)
    check(found, compute_exactly(leaves, ends, gradient, FULL), torch.bfloat16)


def test_gradients_have_the_dropout_of_the_output() -> None:
    heads, rate = 4, 0.3
    leaves, ends, gradient = make(heads, heads, 128, torch.bfloat16)
    # Without scores all weights are equal, and if values are rows of the identity matrix, the
    # output is what dropout has left of the weights.
    zeros, columns = torch.zeros_like(leaves[0]), torch.cat([torch.eye(128)[:n] for n in LENGTHS])
    units = columns[:, None].expand(-1, heads, -1).to(leaves[2]).contiguous()
    options = {"dropout": rate, "window": FULL, "scale": None}
    torch.manual_seed(5)
    kept = row_attention.attend_by_row(zeros, leaves[1], units, ends, 128, **options) != 0
    rows = kept.transpose(0, 1).split(LENGTHS, 1)
    factors = [
        row[..., :length].double() / (1 - rate) for row, length in zip(rows, LENGTHS, strict=True)
    ]
    count = heads * sum(length**2 for length in LENGTHS)
    share = sum(float(each.sum()) for each in factors) * (1 - rate) / count
    assert abs(share - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5
    torch.manual_seed(5)
    found = attend(leaves, ends, gradient, dropout=rate, window=FULL)
    check(found, compute_exactly(leaves, ends, gradient, FULL, factors), torch.bfloat16)
    torch.manual_seed(6)
    other = row_attention.attend_by_row(zeros, leaves[1], units, ends, 128, **options) != 0
    agreement = float((other == kept)[..., :1].float().mean())
    assert agreement < 0.9, "another seed keeps other weights"


def test_other_lengths_and_batches_compile_no_kernel_again(compilations: list[str]) -> None:
    def run(lengths: list[int]) -> None:
        drawn = [torch.randn(sum(lengths), 4, 64, device="cuda").bfloat16() for _ in range(3)]
        leaves = [leaf.requires_grad_() for leaf in drawn]
        ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        attend(leaves, (ends, ends), torch.ones_like(drawn[0]), dropout=0.1, window=CAUSAL)

    run([5, 40])
    compilations.clear()
    for lengths in ([128], [1], [3] * 40, [16, 17, 100, 2], [64, 64]):
        run(lengths)
    assert compilations == []
