"""Find, build and plan models. ``GPTModel`` is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapidformer.models.gpt import GPTConfig, GPTForCausalLM, GPTModel

__all__ = ["GPTConfig", "GPTForCausalLM", "GPTModel"]


def __getattr__(name: str) -> Any:
    # Lazy: torch and transformers take seconds to import, and much of this room needs neither.
    if name in __all__:
        from rapidformer.models import gpt

        return getattr(gpt, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
