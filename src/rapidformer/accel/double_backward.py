"""Refuse gradient penalties (``create_graph=True``) that would differ from those of one process.

The gradient of a mean over this rank's rows is not that of the mean over the global batch, so its
penalty depends on how the batch is split; and ``fully_shard`` frees weights after the first
backward pass. Under tensor and context parallelism, second derivatives with respect to inputs are
exact, but until an update is finished, each rank has only a part of a parameter's gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.torch_dispatch import tree_leaves
from rapidformer.dist.topology import Topology
from rapidformer.errors import TrainingError

_ONE_PASS = {
    "ZeRO": "ZeRO/FSDP", "expert parallelism": "expert parallelism",
    "pipeline": "pipeline parallelism",
}  # fmt: skip
"""Rows under which the backward pass runs only once."""
_WHAT = "torch.autograd.grad(..., create_graph=True) through the model (a gradient penalty)"


def apply(assembly: Assembly) -> None:
    """Check whenever a gradient is taken through the model to be differentiated again."""
    topology, is_by_row = assembly.topology, assembly.is_by_row
    split = " and ".join(words for name, words in _ONE_PASS.items() if assembly.wants(name))

    def see_gradient(gradient: Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass, so only with create_graph
            _check(split, topology, is_by_row=is_by_row())

    def watch_output(module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(see_gradient)

    hook = torch.compiler.disable(watch_output)
    assembly.applied.keep_hook(assembly.model.register_forward_hook(hook))


class RowGradients:
    """Whether the gradients that the user takes now are each row's own."""

    def __init__(self) -> None:
        self.is_taken = False

    def is_on(self) -> bool:
        """Asked by the model's hook, which must not refer to the engine."""
        return self.is_taken


def _check(split: str, topology: Topology, *, is_by_row: bool) -> None:
    """Refuse a gradient penalty that one process would compute differently."""
    if split:
        raise TrainingError(
            f"{_WHAT} does not work under {split}: the backward pass runs only once there. Use "
            "data, tensor or context parallelism."
        )
    if topology.data > 1 and not is_by_row:
        raise TrainingError(
            f"{_WHAT} would depend on how rows are spread over {topology.data} data-parallel ranks "
            "if it differentiates a mean: that mean is taken over this rank's rows. Differentiate "
            "a sum over rows, whose gradient is each row's own, and do so inside `with "
            "engine.model.gradients_by_row():`."
        )


def refuse_double_gradients(assembly: Assembly, flag: str) -> None:
    """Raise if the gradient of a parameter of a split model is differentiated."""

    def check(name: str, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise TrainingError(
                f"{flag}: the loss uses the gradient of {name} (create_graph=True), but each rank "
                "has only a part of that gradient. Penalise gradients with respect to inputs or "
                f"embeddings, or remove {flag}."
            )

    for name, parameter in assembly.model.named_parameters():
        if parameter.requires_grad:
            assembly.applied.keep_hook(parameter.register_hook(partial(check, name)))
