"""Define torch operators that torch.compile can both trace into and cache.

If a graph calls a plain Python function, torch does not reuse its compiled code in another run. The
cache knows an operator by its name and arguments, so all that decides what it does has to be one.
Its code is covered by a digest of our sources in the cache's key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define_composite(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator ``rapidformer::name``, its schema inferred from the annotations."""
    full_name = f"rapidformer::{name}"
    torch.library.define(full_name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(full_name, "CompositeImplicitAutograd", function)
    return getattr(torch.ops.rapidformer, name).default
