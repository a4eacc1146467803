"""Attention over whole sequences in a block that has a slice of the tokens: Ulysses.

An exchange turns this rank's tokens of all heads into all tokens of its heads, for the model's own
attention with the whole mask; a second one turns them back. There are two entry points: Hugging
Face's attention interface, under a name of ours that wraps the model's implementation, and torch's
``scaled_dot_product_attention``, for models that call it directly. Compiled blocks break their
graph here: the exchanges would be recompiled for every length.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rapidformer.accel.unpad.kernels import NAME as UNPADDED
from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.torch_dispatch import FUSED_ATTENTIONS
from rapidformer.compat.transformers_models import (
    chooses_attention,
    get_attention,
    get_attention_table,
    get_mask_table,
    set_attention,
)
from rapidformer.dist.context_region import ContextRegion
from rapidformer.errors import TrainingError
from rapidformer.overlay import find_fact, put_fact

PREFIX = "rapidformer_context_"
KNOWN = ("sdpa", "eager")
"""The implementations that take a mask of tokens x tokens, or none."""


def apply_context_attention(
    model: nn.Module, blocks: list[nn.Module], region: ContextRegion
) -> None:
    """Route the attention of the blocks through our name in Hugging Face's interface."""
    for block in blocks:
        for module in block.modules():
            put_fact(module, region)
    for config in find_configs(model):
        name = get_attention(config)
        if name in KNOWN:
            set_attention(config, PREFIX + name)


def find_configs(model: nn.Module) -> list[Any]:
    """The nested configurations that choose an attention; each part may have its own."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(c): c for c in configs if chooses_attention(c)}.values())


def _list_entries() -> Iterator[Entry]:
    """Functions in transformers' interfaces that split heads around its own."""
    for name in (*KNOWN, UNPADDED):
        build = functools.partial(_build_attention, name)
        yield Entry(get_attention_table(), PREFIX + name, build)
        yield Entry(get_mask_table(), PREFIX + name, functools.partial(_build_masks, name))


ATTENTION = Patch(_list_entries)
"""Inside, transformers' interfaces have our functions."""


def _build_masks(name: str, _: None) -> Any:
    # Looked up at each call: inside a call of ours, it may be another one.
    return lambda *args, **kwargs: get_mask_table()[name](*args, **kwargs)


def _build_attention(name: str, _: None) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        original = get_attention_table().get(name) or _find_eager(module)
        region = find_fact(module, ContextRegion)
        if region is None or not region.length:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        heads, key_heads = query.shape[1], key.shape[1]
        query, key, value = exchange_heads(region, query, key, value)
        mask = _take_heads(region, attention_mask, heads)
        with _sharing(module, heads // key_heads, query.shape[1] // key.shape[1]):
            attended, _ = original(module, query, key, value, mask, *args, **kwargs)
        return region.join_heads(attended.transpose(1, 2)).transpose(1, 2).contiguous(), None

    return attend


def exchange_heads(
    region: ContextRegion, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, from its own tokens of all heads."""
    region.has_attended = True
    times = get_repeats(query.shape[1], key.shape[1], region.size)
    if times > 1:
        key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
    return region.split_heads(query), region.split_heads(key), region.split_heads(value)


def get_repeats(heads: int, key_heads: int, size: int) -> int:
    """How often each key/value head is repeated, so that every rank gets equally many."""
    choices = (n for n in range(1, heads // key_heads + 1) if heads % (key_heads * n) == 0)
    return next(n for n in choices if key_heads * n % size == 0)


def _take_heads(region: ContextRegion, mask: Any, heads: int) -> Any:
    """This rank's part of a mask that differs between heads."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] == 1:
        return mask
    assert mask.shape[1] == heads
    return mask.chunk(region.size, dim=1)[region.rank]


@contextmanager
def _sharing(module: Any, before: int, now: int) -> Iterator[None]:
    """Tell the model's attention how many heads share a key here, if that is fewer."""
    is_told = hasattr(module, "num_key_value_groups") and before != now
    if is_told:
        module.num_key_value_groups = now
    try:
        yield
    finally:
        if is_told:
            module.num_key_value_groups = before


def _find_eager(module: nn.Module) -> Callable[..., Any]:
    """The attention function in the model's own file."""
    for cls in type(module).__mro__:
        file = sys.modules.get(cls.__module__)
        attend: Callable[..., Any] | None = getattr(file, "eager_attention_forward", None)
        if attend is not None:
            return attend
    raise AssertionError(f"{type(module).__name__} has no eager_attention_forward in its file")


_OTHER_MEETINGS = {
    functional.multi_head_attention_forward, *FUSED_ATTENTIONS, torch.conv1d, torch.conv2d,
}  # fmt: skip


class SplitTorchAttention(TorchFunctionMode):
    """While a block runs: torch's attention sees all tokens of this rank's heads."""

    def __init__(self, region: ContextRegion) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OTHER_MEETINGS:
            raise TrainingError(
                f"--context-parallel-size: a block calls {func.__name__}, which also mixes tokens. "
                "Only torch's scaled_dot_product_attention can be split: call it instead, or "
                "remove --context-parallel-size."
            )
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attend_by_torch(self._region, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_torch(
    region: ContextRegion,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """torch's attention on all tokens of this rank's heads."""
    mask = _take_heads(region, attn_mask, query.shape[1])
    query, key, value = exchange_heads(region, query, key, value)
    attended = functional.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
    return region.join_heads(attended)
