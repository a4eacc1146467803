"""The loss over a split vocabulary: in training, no rank holds a whole row of logits.

Used if the model computes its own loss by a function that we know: Hugging Face's
``loss_function``, or a plan with ``has_split_losses``. Otherwise (losses that users compute from
``logits``, evaluation) the head joins its outputs, which is right for any code. Logits are then a
DTensor only inside the model; ``outputs.logits`` are joined once something computes with them
(``accel/split/on_demand.py``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.split.known_loss import build_split_loss, has_labels
from rapidformer.accel.tensor.styles import ColwiseGathered, Split, Style, extend_class
from rapidformer.dist.vocabulary import compute_split_losses, is_split_over_vocabulary
from rapidformer.models.own_loss import find_known_loss
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import find_fact, get_fact


def apply(assembly: Assembly) -> str | None:
    """Keep the logits of the model split, if its loss can be computed from split ones."""
    if assembly.uses_autotp:
        return None
    mesh = assembly.topology.get_submesh("tensor")
    assert mesh is not None
    is_split = apply_vocabulary_loss(assembly.model, assembly.plan, mesh)
    return "no rank holds a whole row of logits" if is_split else None


def apply_vocabulary_loss(model: Any, plan: ModelPlan, mesh: DeviceMesh) -> bool:
    """Keep the logits split if the model's loss allows it; returns whether it does."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, ColwiseGathered):
        return False
    if not plan.has_split_losses:
        shifts = find_known_loss(model)
        if shifts is None:
            return False
        model.loss_function = build_split_loss(
            model.loss_function,
            shifts=shifts,
            is_split=is_split_over_vocabulary,
            sum_losses=_sum_losses,
        )
    split = find_fact(model, Split) or Split(mesh=mesh)
    split.head = get_fact(head, Split)
    extend_class(model, split, LossKeeper)
    return True


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
    return compute_split_losses(logits, labels, ignore_index).sum()
