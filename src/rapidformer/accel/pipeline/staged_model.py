"""The user's model, once it is cut: what a call of it means.

In a schedule a call runs the current stage and, unless that is the last, ends the user's forward
step. Elsewhere, without gradients, it is relayed through all stages and returns the real output on
every rank. Ending a stage takes two methods: ``forward`` catches the end, so that hooks around it
(FSDP's) see an ordinary return; ``__call__``, outside all hooks, raises it again.

A rank's key/value cache has keys and values of its own blocks; the other layers hold one number per
token, so that they are as long. A model reads positions off the cache before its first block, so
each stage must see the lengths from before the call.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rapidformer.accel.pipeline.discovery import iterate_floats
from rapidformer.accel.pipeline.gates import StageContext, StageEnd
from rapidformer.accel.pipeline.layout import Stage
from rapidformer.errors import RapidformerError
from rapidformer.overlay import extend, remove

Relay = Callable[[Callable[[], Any]], Any]
_CACHE = "past_key_values"
_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)
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
    is_open = any(p.kind is p.VAR_KEYWORD for p in accepted.values())

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls.forward(self, *args, **kwargs)
        except StageEnd as end:
            context.ended_with = end.hidden
            return end.hidden

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_collecting(self, kwargs)
        inner_config = getattr(self, "config", None) if is_open else None
        has_cache = "use_cache" in accepted or bool(getattr(inner_config, "use_cache", False))
        if has_cache and kwargs.get("use_cache") is None and len(args) < 2:
            # A stage would fill a cache of its own blocks only.
            kwargs["use_cache"] = False
        own_call = functools.partial(cls.__call__, self)
        run = functools.partial(_call_stage, own_call, context, args, kwargs)
        if context.stage is not None:
            return run()
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
        cache = next((v for v in (*kwargs.values(), *args) if isinstance(v, Cache)), None)
        return relay(run) if cache is None else _relay_with_cache(relay, run, cache, context)

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
            if not _can_have_cache(self, num_blocks):  # it would hold one rank's blocks only
                config = copy.copy(kwargs.get("generation_config"))
                if config is None:
                    kwargs["use_cache"] = False
                else:
                    kwargs["generation_config"], config.use_cache = config, False
            return cls.generate(self, *args, **kwargs)
        # An adapter's model lets the one inside generate: meanwhile, that one is called.
        inner = self.get_base_model()
        apply_staged_calls(inner, context, relay, num_blocks)
        try:
            return cls.generate(self, *args, **kwargs)
        finally:
            remove(inner, "stages")

    return generate


# ---- the cache -----------------------------------------------------------------------------------


def _can_have_cache(model: Any, num_blocks: int) -> bool:
    """Whether ``generate`` will make a cache with one plain layer per block."""
    config = getattr(model, "config", None)
    if config is None or config.is_encoder_decoder:
        return False
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return len(layers) == num_blocks and all(type(layer) in _KINDS for layer in layers)


def _relay_with_cache(
    relay: Relay, run: Callable[[], Any], cache: Cache, context: StageContext
) -> Any:
    """A call through all stages, each of which reads and fills its own layers of the cache."""
    layers = cache.layers
    if not all(type(layer) in _KINDS for layer in layers):
        raise RapidformerError(
            f"{type(cache).__name__} cannot be split over the stages of a pipeline "
            "(--pipeline-model-parallel-size): pass use_cache=False, or a DynamicCache."
        )
    # Shallow: a layer that grows gets new tensors, so its copy stays as it was.
    before = [copy.copy(layer) for layer in layers]
    own: set[int] = set()

    def run_stage() -> Any:
        assert context.stage is not None
        own.update(range(context.stage.start, context.stage.end))
        with _only_layers_of(context.stage, cache, before):
            return _without_cache(run())

    output = relay(run_stage)
    # Make the layers of other ranks as long as this rank's.
    first = min(own)
    grown = layers[first].get_seq_length() - before[first].get_seq_length()
    keys: Any = layers[first].keys
    filling = torch.zeros(keys.shape[0], 1, grown, 1, dtype=keys.dtype, device=keys.device)
    for number, layer in enumerate(layers):
        if number not in own:
            layer.update(filling, filling)
    if hasattr(output, _CACHE):
        output[_CACHE] = cache
    return output


@contextmanager
def _only_layers_of(stage: Stage, cache: Cache, before: list[Any]) -> Iterator[None]:
    """Other stages' layers are as they were before the call."""
    layers = cache.layers
    cache.layers = [
        layer if stage.start <= number < stage.end else before[number]
        for number, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        cache.layers = layers


def _without_cache(output: Any) -> Any:
    """The same output, to be sent to the other ranks; each has a cache of its own."""
    if getattr(output, _CACHE, None) is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != _CACHE})
