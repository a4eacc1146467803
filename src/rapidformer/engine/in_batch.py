"""Losses that compare the rows of a batch with each other, such as in-batch negatives.

The mean of such losses over micro-batches or ranks is not the loss of the whole batch: each row
meets fewer others. Only a look at the loss's graph shows it: near its end, a product of two
activations with a row and a column for each row.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor
from torch.autograd.graph import Node

from rapidformer.compat.torch_tensors import find_product_sizes, is_view_of_leaf
from rapidformer.log import warn_once

_MOST_OPERATIONS = 200
"""A loss's own operations come first; a model has thousands."""
INSTEAD = (
    "Use an objective with a first pass over the whole update (rapidformer.objectives.Objective "
    "with has_first_pass), which compares all of its rows"
)


def warn_if_rows_are_compared(loss: Tensor, updates: int) -> None:
    """Warn of a loss that depends on how an update is split, now and then: terms may come late."""
    if updates & (updates - 1) == 0 and compares_rows(loss):
        warn_once(
            "the loss compares the rows of a micro-batch with each other (in-batch negatives): "
            "with several ranks or micro-batches in an update, each row meets fewer others, so the "
            f"result depends on how the batch is split. {INSTEAD}; on several ranks without "
            "accumulation, engine.gather(rows) in the loss does, too."
        )


def compares_rows(loss: Tensor) -> bool:
    """Whether activations near the loss are compared row by row, and were not gathered."""
    waiting: deque[Node] = deque([loss.grad_fn] if loss.grad_fn is not None else [])
    seen, has_found = set(waiting), False
    while waiting and len(seen) < _MOST_OPERATIONS:
        node = waiting.popleft()
        inputs = [child for child, _ in node.next_functions if child is not None]
        sizes = find_product_sizes(node)
        if sizes is not None and len(inputs) == 2 and not any(map(is_view_of_leaf, inputs)):
            (rows, _), (_, columns) = sizes
            has_found |= rows == columns > 1
        new = [child for child in inputs if child not in seen]
        seen.update(new)
        waiting += new
    return has_found and not any(node.name() == "_GatherBackward" for node in seen)
