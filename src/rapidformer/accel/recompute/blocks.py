"""Activation checkpointing for any model with a list of blocks.

A block's ``__call__`` recomputes: there is no wrapper module, so names, checkpoints and isinstance
are unaffected, and a compiled block is recomputed as compiled. A block that changes its buffers
(BatchNorm does) finds them as they were, and does not change them a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.context.arguments import is_cache
from rapidformer.accel.tensor.styles import SequenceRegion, Split
from rapidformer.compat.torch_dispatch import EXPENSIVE_OPERATORS, SCALED_PRODUCT
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.models.plan import ModelPlan
from rapidformer.optim.multi_tensor.tables import is_recording
from rapidformer.overlay import extend, find_fact, put_fact

_aten = torch.ops.aten
# What selective recompute stores: results that are expensive to compute for their size.
_KEPT = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    SCALED_PRODUCT, *EXPENSIVE_OPERATORS,
}  # fmt: skip

Place = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


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
    for block in plan.require_blocks(model, "--checkpoint-activations")[::interval]:
        splits = (find_fact(module, Split) for module in block.modules())
        regions = (split.region for split in splits if split is not None and split.region)
        if region := next(regions, None):  # it knows how many tokens the ranks share
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
        args = tuple(None if is_cache(value) else value for value in args)
        kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        region = find_fact(self, SequenceRegion)
        if region is not None:
            run = functools.partial(_run_at_length, region, region.length, run)
        buffers = find_fact(self, BlockBuffers)
        if buffers is not None:
            run = buffers.repeat(run)
        # torch cannot read the state of random numbers while it records a CUDA graph; models that
        # draw some are not recorded.
        first = next(self.parameters(), None)
        is_recorded = first is not None and is_recording(first.device)
        state: dict[str, Any] = {"preserve_rng_state": False} if is_recorded else {}
        return checkpoint(run, *args, **state, **options, **kwargs)

    return {"__call__": call}


# Built once: blocks with the same builder share a class, and so a compiled graph.
_BUILDERS = {
    name: functools.partial(_build_recompute, granularity=name) for name in ("full", "selective")
}


def _run_at_length(
    region: Any, length: int, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # By now, other rows of another length may have passed (in a pipeline they have).
    region.length = length
    return run(*args, **kwargs)


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class BlockBuffers:
    """The buffers of a block, and which of them its forward pass changes."""

    def __init__(self, block: nn.Module) -> None:
        self.places: list[Place] = [
            (module, name)
            for module in block.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        # None before the first pass. From then on only these are copied: most buffers are masks
        # and tables that never change, and they can be large.
        self._changing: set[Place] | None = None

    def repeat(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A pass that finds the same buffers when it runs again."""
        before: dict[Place, Tensor] | None = None

        def run_pass(*args: Any, **kwargs: Any) -> Any:
            nonlocal before
            if before is not None:
                with _replaced(before):
                    return run(*args, **kwargs)
            output, before = self._run_first(lambda: run(*args, **kwargs))
            return output

        return run_pass

    def _run_first(self, run: Callable[[], Any]) -> tuple[Any, dict[Place, Tensor]]:
        """The result of a pass, and what the buffers that it changed held before."""
        held = {place: getattr(*place) for place in self.places}
        changes = {place: count_changes(buffer) for place, buffer in held.items()}
        copied = self.places if self._changing is None else self._changing
        copies = {place: held[place].clone() for place in copied}
        output = run()
        changed = {
            place
            for place, buffer in held.items()
            if getattr(*place) is not buffer or count_changes(buffer) != changes[place]
        }
        if self._changing is None:
            # torch's batch_norm changes its statistics without counting it. Comparing values waits
            # for the device, but only in the first pass.
            changed |= {place for place in copies if not torch.equal(copies[place], held[place])}
        # A BatchNorm that was frozen in the first pass counts its batches from now on.
        trained = {module for module, name in changed if name == "num_batches_tracked"}
        changed |= {place for place in self.places if place[0] in trained}
        self._changing = (self._changing or set()) | changed
        # Without a copy, recomputing at least does not change a buffer again.
        late = {place: held[place].clone() for place in self._changing - copies.keys()}
        return output, {p: copies[p] if p in copies else late[p] for p in self._changing}


@contextmanager
def _replaced(before: dict[Place, Tensor]) -> Iterator[None]:
    """Replace the current buffers with copies of these for a while."""
    # Not in place: autograd refuses a buffer that has changed since it was saved.
    current = {place: getattr(*place) for place in before}
    try:
        for place, buffer in before.items():
            setattr(*place, buffer.clone())
        yield
    finally:
        for place, buffer in current.items():
            setattr(*place, buffer)
