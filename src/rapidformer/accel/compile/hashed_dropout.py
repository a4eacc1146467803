"""Dropout of activations in compiled blocks, with random numbers that are cheap to compute.

inductor computes Philox's four random numbers for each element and uses one, which can take longer
than reading and writing the element. Here, a hash of the element's index and a random seed
decides, which takes far fewer operations. The backward pass computes it again, so no mask is kept.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from rapidformer.accel.compile.composite import define_composite
from rapidformer.compat.torch_compile import get_example, is_wrapper
from rapidformer.dist.seeding import hash_bits

_END = 2**31
"""Signed 32-bit integers end before this, and start at its negative."""


def hash_dropout(module: GraphModule) -> None:
    """Rewrite the graph of a block."""
    graph = module.graph
    for node in list(graph.nodes):
        arguments = _read(node)
        if arguments is None:
            continue
        with graph.inserting_before(node):
            dropped = graph.call_function(drop, arguments)
        dropped.meta = dict(node.meta)
        node.replace_all_uses_with(dropped)
        graph.erase_node(node)
    graph.lint()
    module.recompile()


def _read(node: Node) -> tuple[Any, float] | None:
    """Input and rate of a call of dropout, if it can be replaced."""
    if node.op != "call_function" or node.target is not functional.dropout:
        return None
    bound = inspect.signature(functional.dropout).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    source, rate, is_training, is_in_place = bound.arguments.values()
    is_plain = is_training is True and not is_in_place and isinstance(source, Node)
    if not is_plain or not isinstance(rate, float) or not 0 < rate < 1:
        return None  # a rate may be computed in the graph
    value = get_example(source)
    # Indices have 32 bits. A dynamic size is not known here, and is not expected to be this large.
    is_too_large = isinstance(value.numel(), int) and value.numel() >= _END
    # The elements of split (DTensor) and nested tensors cannot be numbered by one range.
    return None if is_too_large or is_wrapper(value) else (source, rate)


def _drop(rows: Tensor, rate: float) -> Tensor:
    """Dropout in training."""
    # From the device's generator, as CUDA graphs, recomputation and resuming expect.
    seed = torch.randint(_END - 1, (1,), dtype=torch.int32, device=rows.device)
    indices = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view(rows.shape)
    # Indices are hashed before the seed is mixed in: otherwise, masks would be permutations of
    # each other.
    lowest_kept = min(round(rate * 2**32) - _END, _END - 1)
    is_kept = hash_bits(hash_bits(indices) ^ seed) >= lowest_kept
    # A product, as in torch: a dropped NaN must stay one, so that a broken step is noticed.
    return is_kept * rows * (1 / (1 - rate))


drop = define_composite("drop", _drop)
