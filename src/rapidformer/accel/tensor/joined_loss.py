"""A loss to which a user has added a term over split parameters: a DTensor.

The sum is right, but its backward pass would send DTensors into the model's plain operations. So
wherever a plain tensor enters an operation on DTensors, its gradient is converted back to a plain
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rapidformer.dist.whole import can_compute_on_strided, find_strided_axis

_TO_PLAIN = ("_ToTorchTensorBackward", "_LocalBackward")
_FROM_PLAIN = ("_FromTorchTensorBackward",)


def join_loss(loss: Tensor) -> Tensor:
    """The loss as a plain tensor that can be back-propagated; unchanged if it cannot be."""
    if not isinstance(loss, DTensor) or loss.device_mesh.mesh_dim_names != ("tensor",):
        return loss  # data-parallel ranks have their own rows: a sum over them is not the loss
    is_split = _find_split(loss.grad_fn) if loss.grad_fn is not None else {}
    leaves = [leaf for node in is_split if (leaf := getattr(node, "variable", None)) is not None]
    # A fused weight, of which a rank holds a piece of each part.
    has_strided = any(find_strided_axis(leaf) is not None for leaf in leaves)
    if has_strided and not can_compute_on_strided(loss.device_mesh):
        return loss  # its backward pass would fail inside torch
    joined = loss.full_tensor()
    if loss.grad_fn is not None:
        _make_plain_again(loss.grad_fn, is_split)
    return joined


def _make_plain_again(root: Any, is_split: dict[Any, bool]) -> None:
    """Hook every plain operation whose result is used by an operation on DTensors."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        if not is_split[node]:
            node.register_prehook(_join_gradients)
            continue
        if node.name() in _FROM_PLAIN:
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _find_split(root: Any) -> dict[Any, bool]:
    """For each operation of the graph, whether its result is a DTensor: one of its inputs is."""
    found: dict[Any, bool] = {}
    waiting = [root]
    while waiting:
        node = waiting[-1]
        children = [] if node.name() in _TO_PLAIN else [c for c, _ in node.next_functions if c]
        missing = [child for child in children if child not in found]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        is_leaf_split = isinstance(getattr(node, "variable", None), DTensor)
        is_made = node.name() in _FROM_PLAIN
        found[node] = is_leaf_split or is_made or any(found[child] for child in children)
    return found


def _join_gradients(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)
