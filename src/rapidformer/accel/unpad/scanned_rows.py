"""Layers that scan their tokens (Mamba-2, Qwen3.5): rows in one sequence, each in its own chunks.

States go through a grid of each row's chunks (``scans/chunks.py``). Between rows are zeros, as many
as the layer's convolution looks back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.scans.chunks import ROWS, SIZE, RowsOfChunks
from rapidformer.accel.unpad.calls import get_call
from rapidformer.accel.unpad.kernels import inside
from rapidformer.accel.unpad.rows import Layout, Rows
from rapidformer.overlay import list_layers

Chunked = tuple[Layout, RowsOfChunks]
"""Where tokens stand, and where chunks do."""


def find_scanning(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that scan tokens by our products."""
    return [module for module in block.modules() if "scans" in list_layers(module)]


def suits(layer: nn.Module, rows: Rows) -> bool:
    """Whether zeros between rows stay zeros up to the convolution."""
    linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    has_biases = any(module.bias is not None for module in linear)
    return bool(_count_zeros(layer)) and not has_biases and rows.is_contiguous


def run_scanning(
    layer: nn.Module, run: Callable[..., Any], rows: Rows, args: Any, kwargs: dict[str, Any]
) -> Tensor:
    """The layer's output for tokens without padding."""
    layout, grid = _find_chunks(rows, _count_zeros(layer))

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor) or not rows.is_packed(value):
            return value
        return layout.pad(value) if value.is_floating_point() else None  # a mask has no more to say

    named = {name: place(value) for name, value in kwargs.items()}
    with inside(ROWS, grid):
        output = run(*map(place, args), **named)
    return layout.take(output.flatten(0, 1))


def _count_zeros(layer: nn.Module) -> int:
    """How many tokens back a layer's convolutions look."""
    convolutions = [module for module in layer.modules() if isinstance(module, nn.Conv1d)]
    return max((int(module.kernel_size[0]) - 1 for module in convolutions), default=0)


def _find_chunks(rows: Rows, zeros: int) -> Chunked:
    """The chunks of all rows: found once for all layers of a call, on the device."""
    call = get_call()
    if call is None:
        return _build_chunks(rows, zeros)
    key = id(rows), zeros
    if key not in call.chunks:
        call.chunks[key] = _build_chunks(rows, zeros)
    chunked: Chunked = call.chunks[key]
    return chunked


def _build_chunks(rows: Rows, zeros: int) -> Chunked:
    # Of rows in a graph, only the number of tokens and a bound of their lengths are fixed.
    tokens, most = len(rows.places), rows.shape[0] - (-len(rows.places) // rows.bound)
    count, width = _divide_up(tokens + most * (zeros + SIZE - 1)), _divide_up(rows.bound + zeros)
    if not rows.is_filled:
        chunks = [_divide_up(length + zeros) for length in rows.lengths if length]
        count, width, most = sum(chunks), max(chunks), len(chunks)
    ends = rows.ends.long()
    lengths = ends.diff()
    chunks_of_row = torch.where(lengths > 0, (lengths + zeros + SIZE - 1) // SIZE, 0)
    starts = chunks_of_row.cumsum(0) - chunks_of_row
    numbers = torch.arange(tokens, device=ends.device)
    row = torch.searchsorted(ends[1:], numbers, right=True)
    places = starts[row] * SIZE + numbers - ends[row]
    return Layout(rows, places, (1, count * SIZE), rows.extra), _build_grid(
        starts, chunks_of_row, count, most, width
    )


def _divide_up(tokens: int) -> int:
    """How many chunks hold so many tokens."""
    return -(-tokens // SIZE)


def _build_grid(
    starts: Tensor, chunks_of_row: Tensor, count: int, most: int, width: int
) -> RowsOfChunks:
    """The places of chunks in a grid of the rows that have tokens."""
    numbers = torch.arange(count, device=starts.device)
    row = torch.searchsorted(starts + chunks_of_row, numbers, right=True)
    is_used = row < len(starts)
    row = row.clamp(max=len(starts) - 1)
    rank = (chunks_of_row > 0).cumsum(0) - 1  # among rows that have tokens
    places = rank[row] * width + numbers - starts[row]
    return RowsOfChunks(places.where(is_used, most * width), most, width)
