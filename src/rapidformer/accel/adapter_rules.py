"""Which switches an adapter cannot be combined with, checked before anything is split."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rapidformer.config import Settings
from rapidformer.config.switches import get_switch
from rapidformer.errors import ConfigurationError
from rapidformer.models.adapters import Adapter, find_adapter

_SPLITTING = ("tensor parallelism", "pipeline", "context parallelism")


def check_adapter(model: nn.Module, args: Settings) -> None:
    """Refuse combinations that would be wrong or without effect."""
    adapter = find_adapter(model)
    problems = [] if adapter is None else list(_find_problems(adapter, args))
    if problems:
        raise ConfigurationError(problems)


def _find_problems(adapter: Adapter, args: Settings) -> Iterator[str]:
    kind = adapter.config.peft_type.value
    for switch in map(get_switch, _SPLITTING if adapter.is_prompt else ()):
        if switch.is_on(args):
            yield (
                f"{switch.describe(args)} cannot split a model with {kind}, whose learned tokens "
                "are outside its layers: use --zero-3-memory-optimization, or LoRA (--lora-rank)."
            )
    if adapter.is_prompt and args.packing:
        yield (
            f"--packing cannot be combined with {kind}: peft ignores the positions of packed "
            "examples. Leave it out, or use LoRA (--lora-rank)."
        )
    recompute = get_switch("recompute")
    if kind == "PREFIX_TUNING" and recompute.is_on(args):
        yield (
            f"{recompute.describe(args)} cannot be combined with {kind}: a recomputed block has no "
            "cache, which holds the learned keys and values. Use LoRA (--lora-rank), or leave one "
            "of them out."
        )
