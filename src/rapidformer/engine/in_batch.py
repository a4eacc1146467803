"""What the graph of a loss shows: what it is a mean or a sum over, and in-batch negatives.

The mean over micro-batches or ranks of a loss that compares rows is not the loss of the whole
batch: each row meets fewer others. Only a look at the loss's graph shows it: near its end, a
product of two activations with a row and a column for each row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node

from rapidformer.compat.torch_tensors import (
    find_factor,
    find_mean_count,
    find_product_sizes,
    find_sum_count,
    is_view_of_leaf,
)
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
    has_found, was_gathered = False, False
    for node, inputs in _list_last_operations(loss):
        was_gathered |= node.name() == "_GatherBackward"
        sizes = find_product_sizes(node)
        if sizes is not None and len(inputs) == 2 and not any(map(is_view_of_leaf, inputs)):
            (rows, _), (_, columns) = sizes
            has_found |= rows == columns > 1
    return has_found and not was_gathered


def warn_of_other_weight(loss: Tensor, weight: float | Tensor, updates: int) -> None:
    """Warn in the first update if not the labels that the loss is a mean over were counted."""
    if updates > 0 or isinstance(weight, Tensor) or not weight:
        return  # later, the host does not wait for numbers of the device
    total = _find_weight_of_sum(loss)
    if total is not None and abs(total - 1) > 1e-3:
        warn_once(
            "the loss of a micro-batch is a sum over labels, and not divided by their number: "
            "micro-batches are weighted by their labels already, so this counts them twice. Return "
            'the mean over the labels of the micro-batch: reduction="mean". Or pass '
            "backward(loss, weight=1), if it is divided by the labels of the global batch and "
            "multiplied by the number of its micro-batches."
        )
    counts = [find_mean_count(node) for node, _ in _list_last_operations(loss)]
    known = [count for count in counts if count is not None]
    if len(known) == 1 and known[0] not in (0.0, weight):
        warn_once(
            f"the loss of a micro-batch is a mean over {'fewer' if known[0] < weight else 'more'} "
            "labels than were counted in its batch (a model of your own may shift them, or leave "
            "some out), so micro-batches with unequal counts do not weigh what they should. Pass "
            "engine.backward(loss, weight=n), return (loss, n) from run_forward_step, or set "
            "labels that are never compared to -100."
        )


def _find_weight_of_sum(loss: Tensor) -> float | None:
    """What all labels of a summed loss weigh together, 1 in a mean; None if it is no such sum."""
    node, factor = loss.grad_fn, 1.0
    while node is not None:
        count = find_sum_count(node)
        if count is not None:
            return count * factor
        scale = find_factor(node)
        if scale is None:
            return None
        factor *= scale
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return None


def _list_last_operations(loss: Tensor) -> Iterator[tuple[Node, list[Node]]]:
    """The operations nearest to the loss, each with those before it."""
    waiting: deque[Node] = deque([loss.grad_fn] if loss.grad_fn is not None else [])
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        inputs = [child for child, _ in node.next_functions if child is not None]
        yield node, inputs
        new = [child for child in inputs if child not in seen][: _MOST_OPERATIONS - len(seen)]
        seen.update(new)
        waiting += new
