"""A key/value cache whose layers are spread over the stages of a pipeline.

Every rank has a cache with all layers, but keys and values of its own blocks only; the other layers
hold one number per token, so that they are as long. A model reads positions and masks off the cache
before its first block, so each stage must see the lengths from before the call, also on a rank that
has already run an earlier stage in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rapidformer.accel.pipeline.gates import StageContext
from rapidformer.accel.pipeline.layout import Stage
from rapidformer.errors import RapidformerError

_NAME = "past_key_values"
_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)

Relay = Callable[[Callable[[], Any]], Any]


def can_have_cache(model: Any, num_blocks: int) -> bool:
    """Whether ``generate`` will make a cache with one plain layer per block."""
    config = getattr(model, "config", None)
    if config is None or config.is_encoder_decoder:
        return False
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return len(layers) == num_blocks and all(type(layer) in _KINDS for layer in layers)


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the arguments of a model."""
    return next((each for each in (*kwargs.values(), *args) if isinstance(each, Cache)), None)


def relay_with_cache(
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
    _fill_others(layers, before, own)
    if hasattr(output, _NAME):
        output[_NAME] = cache
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
    if getattr(output, _NAME, None) is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != _NAME})


def _fill_others(layers: list[Any], before: list[Any], own: set[int]) -> None:
    """Make the layers of other ranks as long as this rank's."""
    first = min(own)
    grown = layers[first].get_seq_length() - before[first].get_seq_length()
    keys = layers[first].keys
    filling = torch.zeros(keys.shape[0], 1, grown, 1, dtype=keys.dtype, device=keys.device)
    for number, layer in enumerate(layers):
        if number not in own:
            layer.update(filling, filling)
