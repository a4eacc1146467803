"""What a block or a model is called with."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def find_argument_names(block: nn.Module) -> tuple[str, ...]:
    """The positional arguments of a block's own forward, beneath the overlays of switches."""
    for cls in type(block).__mro__:
        if "forward" in vars(cls):
            parameters = inspect.signature(inspect.unwrap(vars(cls)["forward"])).parameters
            if not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
                return tuple(parameters)[1:]
    return ()


def is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values."""
    # By name: models without transformers must not import it.
    return any(cls.__name__ == "Cache" for cls in type(value).__mro__)
