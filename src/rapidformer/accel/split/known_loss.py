"""Losses of models that we can compute from logits split over the vocabulary or the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.context.arguments import find_argument_names
from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.models.own_loss import find_known_loss
from rapidformer.models.plan import ModelPlan

SumLosses = Callable[[Tensor, Tensor, int], Tensor]
"""Logits, labels and the ignored label -> the sum of all losses."""


def has_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model is called with labels."""
    if len(args) > 1 and "labels" not in kwargs:
        kwargs = dict(zip(find_argument_names(model), args, strict=False))
    return kwargs.get("labels") is not None


def find_head(model: Any) -> nn.Module | None:
    """A model's output layer, if it says which that is."""
    get_head: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    return get_head()


def use_split_loss(
    model: Any, plan: ModelPlan, is_split: Callable[[Tensor], bool], sum_losses: SumLosses
) -> bool:
    """Let a model compute its loss from logits that stay split; False if we do not know how."""
    if plan.has_split_losses:
        return True
    shifts = find_known_loss(model)
    if shifts is None:
        return False
    original = model.loss_function

    def compute_loss(
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not is_split(logits):
            known = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            if shift_labels is not None:
                known["shift_labels"] = shift_labels
            return original(logits, labels, *args, **known, **kwargs)
        if shift_labels is not None:
            labels = shift_labels
        elif shifts:
            # Before tokens are split: the next token may be on another rank.
            labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        labels = labels.to(logits.device)
        total = sum_losses(logits, labels, ignore_index)
        if num_items_in_batch is None:
            return total / (labels != ignore_index).sum()
        return total / num_items_in_batch

    model.loss_function = compute_loss
    return True
