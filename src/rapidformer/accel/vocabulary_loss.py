"""The loss over a split vocabulary: in training, no process holds a whole row of logits.

It is switched on where the model computes its own loss by a function that we know: Hugging Face's
``loss_function``, or a plan that says ``has_split_losses``. Everywhere else (losses that users
compute from ``logits``, evaluation) the head joins its outputs, which is right for any code. What a
reader would get wrong: while it is on, ``outputs.logits`` of a training step is a DTensor; every
operation on it is still right, and ``.full_tensor()`` joins it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from rapidformer.accel.tensor_styles import ColwiseGathered, Split, Style, extend_class
from rapidformer.dist.vocabulary import compute_split_losses, is_split_over_vocabulary
from rapidformer.models.plan import ModelPlan

_IGNORED = -100


def apply_vocabulary_loss(model: Any, plan: ModelPlan, mesh: DeviceMesh) -> bool:
    """Keep the logits split where the model's loss allows it; whether it does."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, ColwiseGathered):
        return False
    if not plan.has_split_losses:
        shifts = find_known_loss(model)
        if shifts is None:
            return False
        model.loss_function = _build_loss(model.loss_function, shifts=shifts)
    split = model.__dict__.get("rapidformer_split") or Split(mesh=mesh)
    split.head = head.rapidformer_split
    extend_class(model, split, LossKeeper)
    return True


class LossKeeper(Style):
    """A model that is given labels in training: its head need not join the logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head = self.rapidformer_split.head
        assert head is not None
        head.keeps_output_split = self.training and self._has_labels(args, kwargs)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            head.keeps_output_split = False

    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return has_labels(super().forward, args, kwargs)  # type: ignore[misc]


def has_labels(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model is called with labels."""
    if len(args) > 1 and "labels" not in kwargs:
        names = inspect.signature(forward).bind_partial(*args)
        return names.arguments.get("labels") is not None
    return kwargs.get("labels") is not None


def find_known_loss(model: Any) -> bool | None:
    """Whether the model's own loss shifts its labels; None where it is not one that we know."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return None
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    return {ForCausalLMLoss: True, ForMaskedLMLoss: False}.get(model.loss_function)


def _build_loss(original: Callable[..., Tensor], *, shifts: bool) -> Callable[..., Tensor]:
    """Hugging Face's loss of the same name, for logits that may be split."""

    def compute_loss(
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not is_split_over_vocabulary(logits):
            known = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            if shift_labels is not None:
                known["shift_labels"] = shift_labels
            return original(logits, labels, *args, **known, **kwargs)
        if shift_labels is not None:
            labels = shift_labels
        elif shifts:
            labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        labels = labels.to(logits.device)
        total = compute_split_losses(logits, labels, ignore_index).sum()
        if num_items_in_batch is None:
            return total / (labels != ignore_index).sum()
        return total / num_items_in_batch

    return compute_loss
