"""The outputs of a split model: whole, like those of one process.

Attention weights are joined over the heads; logits that the model kept split for its own loss are
joined once something computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rapidformer.accel.split.on_demand import hand_out
from rapidformer.accel.tensor.styles import Split, Style
from rapidformer.dist.regions import Group, gather_out
from rapidformer.errors import TrainingError
from rapidformer.overlay import get_fact

_HEADS = 1


class WholeOutputs(Style):
    """The whole model."""

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
            _join(weights, group) if isinstance(weights, Tensor) else weights
            for weights in output[key]
        )


def _join(weights: Tensor, group: Group) -> Tensor:
    return gather_out(weights, _HEADS, weights.shape[_HEADS] * group.size(), group)
