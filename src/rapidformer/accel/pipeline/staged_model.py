"""The user's model, once it is cut: what a call of it means.

In a schedule a call runs the current stage and, unless that is the last, ends the user's forward
step. Elsewhere, without gradients, it is relayed through all stages and returns the real output on
every rank. Ending a stage takes two methods: ``forward`` catches the end, so that hooks around it
(FSDP's) see an ordinary return; ``__call__``, outside all hooks, raises it again for the user's
code.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rapidformer.accel.pipeline.discovery import iterate_floats
from rapidformer.accel.pipeline.gates import StageContext, StageEnd
from rapidformer.accel.pipeline.stage_cache import (
    Relay,
    can_have_cache,
    find_cache,
    relay_with_cache,
)
from rapidformer.errors import RapidformerError
from rapidformer.overlay import extend, remove

_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def apply_staged_calls(
    model: nn.Module, context: StageContext, relay: Relay, num_blocks: int
) -> nn.Module:
    """Make calls of the model follow the context, or go through the relay; in place."""
    extend(model, "stages", lambda cls: _build_staged(cls, context, relay, num_blocks))
    return model


def _build_staged(cls: Any, context: StageContext, relay: Relay, num_blocks: int) -> dict[str, Any]:
    """The overlay of a model that runs one stage per call."""
    accepted = inspect.signature(cls.forward).parameters
    # An adapter's model passes unknown attributes on to the one inside.
    is_open = any(each.kind is each.VAR_KEYWORD for each in accepted.values())

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls.forward(self, *args, **kwargs)
        except StageEnd as end:
            context.ended_with = end.hidden
            return end.hidden

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_collecting(self, kwargs)
        has_cache = "use_cache" in accepted or (is_open and _has_cache(self))
        if has_cache and kwargs.get("use_cache") is None and len(args) < 2:
            # A stage would fill a cache of its own blocks only.
            kwargs["use_cache"] = False
        if context.stage is not None:
            return _call_stage(functools.partial(cls.__call__, self), context, args, kwargs)
        if self.training and torch.is_grad_enabled():
            raise RapidformerError(
                "this model is cut into stages (--pipeline-model-parallel-size), so a loop cannot "
                "call it and engine.backward() itself: several micro-batches are in flight at "
                "once. Let the engine run the update:\n"
                "    for update in engine.data.iterate_updates(loader):\n"
                "        engine.run_update(forward, update)  # forward(batch) returns the loss\n"
                "        engine.step()\n"
                "or use Finetuner or PreTrainer. (For an evaluation, call model.eval() first.)"
            )
        run = functools.partial(
            _call_stage, functools.partial(cls.__call__, self), context, args, kwargs
        )
        cache = find_cache(args, kwargs)
        return relay(run) if cache is None else relay_with_cache(relay, run, cache, context)

    members: dict[str, Any] = {"forward": forward, "__call__": call}
    if hasattr(cls, "generate"):
        members["generate"] = _build_generate(cls, context, relay, num_blocks)
    return members


def _call_stage(
    run: Callable[..., Any], context: StageContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the model's own call, which ends early unless this is the last stage."""
    if context.has_called:
        raise RapidformerError(
            "the forward step called the model twice. With --pipeline-model-parallel-size it may "
            "call it once per micro-batch: join the two batches, or remove the switch."
        )
    context.has_called = context.is_in_model = True
    context.given = tuple(t for t in iterate_floats((args, kwargs)) if t.requires_grad)
    try:
        output = run(*args, **kwargs)
    finally:
        context.is_in_model = False
    if context.ended_with is not None:
        raise StageEnd(context.ended_with)
    return output


def _has_cache(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def _refuse_collecting(model: Any, kwargs: dict[str, Any]) -> None:
    config = getattr(model, "config", None)
    for name in _COLLECTED:
        if kwargs.get(name) or (kwargs.get(name) is None and getattr(config, name, False)):
            raise RapidformerError(
                f"{name}=True collects something from every block, but other ranks hold some of "
                "this model's blocks (--pipeline-model-parallel-size). Use only one of them."
            )


def _build_generate(
    cls: Any, context: StageContext, relay: Relay, num_blocks: int
) -> Callable[..., Any]:
    """``generate`` of a model cut into stages."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "get_base_model"):
            if not can_have_cache(self, num_blocks):
                _turn_cache_off(kwargs)
            return cls.generate(self, *args, **kwargs)
        # An adapter's model lets the one inside generate: meanwhile, that one is called.
        inner = self.get_base_model()
        apply_staged_calls(inner, context, relay, num_blocks)
        try:
            return cls.generate(self, *args, **kwargs)
        finally:
            remove(inner, "stages")

    return generate


def _turn_cache_off(kwargs: dict[str, Any]) -> None:
    """A cache that stages cannot split would hold one rank's blocks only."""
    config = kwargs.get("generation_config")
    if config is None:
        kwargs["use_cache"] = False
    else:
        kwargs["generation_config"] = copy.copy(config)
        kwargs["generation_config"].use_cache = False
