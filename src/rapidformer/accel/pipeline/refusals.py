"""What a loss must not be made from where each process holds one stage of the model.

The loss is computed on the last stage. What it takes from other stages besides the hidden state
(activations caught by hooks, their parameters) would be missing there, and nothing would fail.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from rapidformer.accel.pipeline.layout import FLAG, Layout
from rapidformer.accel.watched import describe_watched, find_watched, list_inner_modules
from rapidformer.models.plan import ModelPlan


def list_far_modules(model: nn.Module, layout: Layout, plan: ModelPlan) -> dict[str, nn.Module]:
    """The blocks, and what is in them, that do not run where the loss is computed."""
    return list_inner_modules(model, plan.blocks[: layout.stages[-1].start])


def find_hook_problem(far: Mapping[str, nn.Module]) -> str:
    """Say that a hook watches what the loss cannot see; empty where none does."""
    watched = find_watched(far)
    if not watched:
        return ""
    return (
        f"{FLAG}: there is a hook on {describe_watched(watched)}, which runs on another stage than "
        "the loss, so a loss made from what it catches would be another one. Hook blocks of the "
        "last stage only, or use --tensor-model-parallel-size or --zero-3-memory-optimization "
        "instead. If the hook only looks, say so: hook.only_looks = True."
    )
