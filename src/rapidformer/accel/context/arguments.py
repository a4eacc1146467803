"""The arguments of a block besides its hidden states, if it has a slice of the tokens.

Positions (and anything else with one value per token) are split like the hidden states; masks,
which say which tokens see which, stay whole: attention sees all tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rapidformer.dist.context_region import TOKENS, ContextRegion


@dataclass(frozen=True, kw_only=True)
class ArgumentSplit:
    """How the arguments of a block are split."""

    region: ContextRegion
    token_dims: Mapping[str, int]
    """Arguments with a value per token, and the dimension of the tokens."""
    names: tuple[str, ...]
    """The block's positional arguments."""


def find_argument_names(block: nn.Module) -> tuple[str, ...]:
    """The positional arguments of a block's own forward, beneath the overlays of switches."""
    for cls in type(block).__mro__:
        if "forward" in vars(cls):
            parameters = inspect.signature(inspect.unwrap(vars(cls)["forward"])).parameters
            if not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
                return tuple(parameters)[1:]
    return ()


def slice_arguments(
    split: ArgumentSplit, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """This rank's slice of the per-token arguments; hidden states unchanged."""
    names = (*split.names, *[""] * len(args))
    pairs = zip(names[1:], args[1:], strict=False)
    sliced = {name: _slice(split, name, value, length) for name, value in kwargs.items()}
    if not args and "hidden_states" in kwargs:
        sliced["hidden_states"] = kwargs["hidden_states"]
    return (*args[:1], *(_slice(split, name, value, length) for name, value in pairs)), sliced


def is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values."""
    # By name: models without transformers must not import it.
    return any(cls.__name__ == "Cache" for cls in type(value).__mro__)


def _slice(split: ArgumentSplit, name: str, value: Any, length: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_slice(split, name, part, length) for part in value)
    if isinstance(value, dict):
        return {key: _slice(split, name, part, length) for key, part in value.items()}
    if not isinstance(value, Tensor):
        return None if is_cache(value) else value
    dim = split.token_dims.get(name)
    if dim is None:
        is_per_token = value.dim() in (2, 3) and value.shape[TOKENS] == length
        if not is_per_token or "mask" in name:
            return value
        dim = TOKENS
    return split.region.slice(value, dim)
