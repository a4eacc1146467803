"""Activation checkpointing for any model with a list of blocks.

A block's ``__call__`` recomputes: there is no wrapper module, so names, checkpoints and isinstance
are unaffected, and a compiled block is recomputed as compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.recompute.changed_buffers import BlockBuffers, RepeatedPass
from rapidformer.accel.tensor.styles import SequenceRegion, Split
from rapidformer.compat.torch_dispatch import EXPENSIVE_OPERATORS, SCALED_PRODUCT
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import extend, find_fact, put_fact

_aten = torch.ops.aten
# What selective recompute stores: results that are expensive to compute for their size.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    SCALED_PRODUCT,
    *EXPENSIVE_OPERATORS,
}


def apply(assembly: Assembly) -> str:
    """Recompute the blocks of this rank."""
    granularity = assembly.args.recompute_granularity or "full"
    interval = assembly.args.recompute_interval
    apply_recompute(assembly.model, assembly.plan, granularity=granularity, interval=interval)
    which = f"1 in {interval} of" if interval > 1 else "all"
    return f"{granularity}, {which} {len(assembly.whole_plan.blocks)} blocks"


def apply_recompute(
    model: nn.Module, plan: ModelPlan, *, granularity: str = "full", interval: int = 1
) -> nn.Module:
    """Recompute every ``interval``-th block in the backward pass."""
    if not plan.blocks:
        raise ConfigurationError(
            f"--checkpoint-activations: no repeated blocks were found in {type(model).__name__}. "
            "Give the model a method rapidformer_plan() that returns {'blocks': 'name.of.list'}."
        )
    for block in plan.get_blocks(model)[::interval]:
        region = _find_region(block)
        if region is not None:
            put_fact(block, region)
        buffers = BlockBuffers(block)
        if buffers.places:
            put_fact(block, buffers)
        extend(block, "recompute", _BUILDERS[granularity], is_shared=True)
    return model


def _build_recompute(cls: type[nn.Module], granularity: str) -> dict[str, Any]:
    """The overlay of a block that is recomputed in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False}
    if granularity == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = functools.partial(cls.__call__, self)
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        # A block that fills a key-value cache would fill it twice, and training needs none.
        args = tuple(_drop_cache(value) for value in args)
        kwargs = {name: _drop_cache(value) for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        region = find_fact(self, SequenceRegion)
        if region is not None:
            run = functools.partial(_run_at_length, region, region.length, run)
        buffers = find_fact(self, BlockBuffers)
        if buffers is not None:
            run = RepeatedPass(buffers, run)
        return checkpoint(run, *args, **options, **kwargs)

    return {"__call__": call}


# Built once: blocks with the same builder share a class, and so a compiled graph.
_BUILDERS = {
    granularity: functools.partial(_build_recompute, granularity=granularity)
    for granularity in ("full", "selective")
}


def _find_region(block: nn.Module) -> SequenceRegion | None:
    """If the block's tokens are split over ranks: the object that knows how many there are."""
    splits = (find_fact(module, Split) for module in block.modules())
    return next((split.region for split in splits if split is not None and split.region), None)


def _run_at_length(
    region: Any, length: int, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # By now, other rows of another length may have passed (in a pipeline they have).
    region.length = length
    return run(*args, **kwargs)


def _drop_cache(value: Any) -> Any:
    # By name: models without transformers must not import it.
    return None if any(cls.__name__ == "Cache" for cls in type(value).__mro__) else value


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
