"""Dropout of activations in compiled blocks, with random numbers that are cheap to compute.

inductor computes Philox's four random numbers for each element and uses one, which can take longer
than reading and writing the element. Here, a hash of the element's index and a random seed
decides, which takes far fewer operations. The backward pass computes it again, so no mask is kept.
Each operation here also takes time to compile, in both passes: a hash of 32 bits had twice as many,
and they were half of the compilation of a BERT block.
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

_SEEDS = 2**63 - 1
_FACTOR = 0xD6E8FEB86659FD93 - 2**64
"""As a signed number. How random its masks are was measured: benchmarks/ATTEMPTS.md."""


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
    # The elements of split (DTensor) and nested tensors cannot be numbered by one range.
    return None if is_wrapper(get_example(source)) else (source, rate)


def _drop(rows: Tensor, rate: float) -> Tensor:
    """Dropout in training."""
    # From the device's generator, as CUDA graphs, recomputation and resuming expect. There are so
    # many seeds that two masks hardly ever hash the same numbers.
    numbers = torch.randint(_SEEDS, (1,), device=rows.device)
    numbers = numbers + torch.arange(rows.numel(), device=rows.device).view(rows.shape)
    for _ in range(2):  # a shift of signed numbers copies the sign, hence the mask
        numbers = (numbers ^ ((numbers >> 32) & 0xFFFFFFFF)) * _FACTOR
    # In 32 bits: torch keeps, instead of computing again, what takes less than a quarter.
    numbers = (numbers >> 32).to(torch.int32)
    is_kept = numbers >= min(round(rate * 2**32) - 2**31, 2**31 - 1)
    # A product, as in torch: a dropped NaN must stay one, so that a broken step is noticed.
    return is_kept * rows * (1 / (1 - rate))


drop = define_composite("drop", _drop)
