"""What a split model returns: whole outputs, and a loss over a split vocabulary.

In training, no rank holds a whole row of logits if the model computes its own loss by a function
that we know; otherwise the head joins its outputs, which is right for any code. Logits are then a
DTensor only inside the model; ``outputs.logits`` are joined on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.split.known_loss import find_head, has_labels, use_split_loss
from rapidformer.accel.split.on_demand import hand_out
from rapidformer.accel.tensor.styles import ColwiseGathered, Split, Style, extend_class
from rapidformer.dist.regions import Group, gather_out
from rapidformer.dist.vocabulary import compute_split_losses, is_split_over_vocabulary
from rapidformer.errors import TrainingError
from rapidformer.overlay import get_fact

_HEADS = 1


def apply(assembly: Assembly) -> str | None:
    """Keep the logits of the model split, if its loss can be computed from split ones."""
    model = assembly.model
    head = find_head(model)
    if not isinstance(head, ColwiseGathered):  # AutoTP's is another one
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
    return compute_split_losses(logits, labels, ignore_index).sum()


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
