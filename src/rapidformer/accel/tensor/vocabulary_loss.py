"""What a split model returns: whole outputs, and a loss over a split vocabulary.

In training, no rank holds a whole row of logits if the model computes its own loss by a function
that we know; otherwise the head joins its outputs, which is right for any code. Logits are then a
DTensor only inside the model; ``outputs.logits`` are joined on demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.fused_loss.noted import note
from rapidformer.accel.split.known_loss import find_head, has_labels, use_split_loss
from rapidformer.accel.split.on_demand import hand_out
from rapidformer.accel.tensor.styles import ColwiseGathered, Split, Style, extend_class
from rapidformer.dist.regions import Group, gather_out
from rapidformer.dist.vocabulary import compute_split_losses, is_split_over_vocabulary
from rapidformer.dist.whole import can_compute_on_strided, find_strided_axis
from rapidformer.errors import TrainingError
from rapidformer.overlay import get_fact

_HEADS = 1


def apply(assembly: Assembly) -> str | None:
    """Keep the logits of the model split, if its loss can be computed from split ones."""
    model = assembly.model
    head = find_head(model)
    if not isinstance(head, ColwiseGathered):
        return None
    if not use_split_loss(model, assembly.plan, is_split_over_vocabulary, _sum_losses):
        return None
    split = get_fact(model, Split)
    split.head = get_fact(head, Split)
    extend_class(model, split, LossKeeper)
    return "no rank holds a whole row of logits"


class LossKeeper(Style):
    """A model called with labels in training: its head need not join the logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head = get_fact(self, Split).head
        assert head is not None
        head.keeps_output_split = self.training and has_labels(self, args, kwargs)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            head.keeps_output_split = False


def _sum_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    losses = compute_split_losses(logits, labels, ignore_index)
    note(losses.flatten(), labels.flatten(), ignore_index)
    return losses.sum()


class WholeOutputs(Style):
    """The whole model: its attention weights are joined over the heads, and logits on demand."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if kwargs.get("output_attentions") and not isinstance(output, Mapping):
            raise TrainingError(
                "--tensor-model-parallel-size: output_attentions=True with return_dict=False would "
                "return only the attention weights of each rank's own heads. Remove return_dict."
            )
        if isinstance(output, Mapping):
            _join_heads(output, get_fact(self, Split).group)
        return hand_out(output)


def _join_heads(output: Any, group: Group) -> None:
    """Replace each block's attention weights, in place."""
    for key in [key for key in output if key.endswith("attentions") and output[key] is not None]:
        output[key] = tuple(
            gather_out(weights, _HEADS, weights.shape[_HEADS] * group.size(), group)
            if isinstance(weights, Tensor)
            else weights
            for weights in output[key]
        )


_TO_PLAIN = ("_ToTorchTensorBackward", "_LocalBackward")
_FROM_PLAIN = ("_FromTorchTensorBackward",)


def join_loss(loss: Tensor) -> Tensor:
    """The loss, to which a user has added a term over split parameters, as a plain tensor.

    The sum is right, but its backward pass would send DTensors into the model's plain operations:
    wherever a plain tensor enters an operation on DTensors, its gradient is made plain again.
    """
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
