"""The user's model, once it is cut: what a call of it means.

In a schedule a call runs the current stage and, unless that is the last, ends the user's forward
step. Elsewhere, without gradients, it is relayed through all stages, one rank at a time, and
returns the real output on every rank: all must make the same calls. Ending a stage takes two
methods: ``forward`` catches the end, so that hooks around it (FSDP's) see an ordinary return;
``__call__``, outside all hooks, raises it again.

A rank's key/value cache has keys and values of its own blocks; the other layers hold one number per
token, so that they are as long. A model reads positions off the cache before its first block, so
each stage must see the lengths from before the call.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rapidformer.accel.pipeline.discovery import iterate_floats
from rapidformer.accel.pipeline.gates import StageContext, StageEnd, refuse_second_model
from rapidformer.accel.pipeline.layout import Layout
from rapidformer.errors import RapidformerError
from rapidformer.models.watched import find_requested
from rapidformer.overlay import extend, remove

Relay = Callable[[Callable[[], Any]], Any]
_DIMENSIONS = 8
_CACHE = "past_key_values"
_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)


def apply_staged_calls(
    model: nn.Module, context: StageContext, relay: Relay, num_blocks: int
) -> None:
    """Make calls of the model follow the context, or go through the relay; in place."""
    extend(model, "stages", lambda cls: _build_staged(cls, context, relay, num_blocks))


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
        if name := find_requested(self, kwargs):
            raise RapidformerError(
                f"{name}=True collects something from every block, but other ranks hold some of "
                "this model's blocks (--pipeline-model-parallel-size). Use only one of them."
            )
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
        refuse_second_model()
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
        blocks = range(context.stage.start, context.stage.end)
        own.update(blocks)
        # Other stages' layers are as they were before the call.
        cache.layers = [now if n in blocks else before[n] for n, now in enumerate(layers)]
        try:
            output = run()
        finally:
            cache.layers = layers
        if getattr(output, _CACHE, None) is None:
            return output
        # To be sent to the other ranks; each has a cache of its own.
        return type(output)(**{name: value for name, value in output.items() if name != _CACHE})

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


# ---- the relay -----------------------------------------------------------------------------------


def relay_call(
    run: Callable[[], Any],
    layout: Layout,
    context: StageContext,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Any:
    """``run()`` calls the model; returns the last stage's output, on every rank."""
    process = dist.get_rank(group)
    hidden: Tensor | None = None
    output: Any = None
    with torch.no_grad():
        for stage in layout.stages:
            if stage.owner == process:
                before = layout.stages[stage.index - 1].owner
                if not stage.is_first and before != process:
                    hidden = _receive(before, group, device, context.dtype)
                with context.at(stage, hidden):
                    try:
                        output = run()
                    except StageEnd as end:
                        hidden = end.hidden
                after = layout.stages[min(stage.index + 1, len(layout.stages) - 1)].owner
                if after != process:
                    assert hidden is not None
                    _send(hidden, after, group)
        return broadcast_nested(output, layout.stages[-1].owner, group, device)


def _send(hidden: Tensor, process: int, group: dist.ProcessGroup) -> None:
    shape = [*hidden.shape, *[0] * (_DIMENSIONS - hidden.dim())]
    header = torch.tensor([hidden.dim(), *shape], dtype=torch.long, device=hidden.device)
    dist.send(header, group=group, group_dst=process)
    dist.send(hidden.contiguous(), group=group, group_dst=process)


def _receive(
    process: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> Tensor:
    header = torch.empty(_DIMENSIONS + 1, dtype=torch.long, device=device)
    dist.recv(header, group=group, group_src=process)
    dims, *shape = header.tolist()
    hidden = torch.empty(shape[:dims], dtype=dtype, device=device)
    dist.recv(hidden, group=group, group_src=process)
    return hidden


@dataclass
class _Slot:
    """The position of a tensor in an output whose tensors are sent separately."""

    number: int


def broadcast_nested(
    value: Any, source: int, group: dist.ProcessGroup, device: torch.device
) -> Any:
    """A nested value of one rank of the group, on all of them; tensors are sent as tensors."""
    is_source = dist.get_rank(group) == source
    tensors: list[Tensor] = []
    box: list[Any] = [None]
    if is_source:
        form = _map(value, lambda leaf: _take(leaf, tensors))
        box = [(form, [(t.shape, t.dtype) for t in tensors])]
    dist.broadcast_object_list(box, group=group, group_src=source)
    form, kinds = box[0]
    if not is_source:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)
    if is_source:
        return value
    return _map(form, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Slot) else leaf)


def _take(leaf: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    tensors.append(whole.detach().contiguous())
    return _Slot(len(tensors) - 1)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested value with other leaves; a model's output object keeps its class."""
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = _map(item, change)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return change(value)
