"""``torch.compile`` block by block.

Equal blocks share one compiled graph, so a deep model compiles as fast as a shallow one, and what
stands around the blocks (user code, losses, data-dependent branches) cannot break a graph.
"""

from __future__ import annotations

from torch import nn

from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan


def apply_compile(model: nn.Module, plan: ModelPlan, *, backend: str = "inductor") -> nn.Module:
    """Compile each block in place; the whole model where it has no blocks."""
    if plan.blocks:
        for block in plan.get_blocks(model):
            block.compile(backend=backend)
    else:
        warn_once(
            f"--compile: no repeated blocks were found in {type(model).__name__}, "
            "so the whole model is compiled."
        )
        model.compile(backend=backend)
    return model
