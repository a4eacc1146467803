"""Python functions as operators of torch that torch.compile can both look into and cache.

A graph may call any Python function, but torch then never reuses what it compiled from that graph
in an earlier run. An operator can be cached. One that is declared as a composite of others is
still traced into, so its operations are fused and differentiated as if the graph had them.

The cache knows the operator by its name and arguments only. So everything that decides what it
does has to be an argument, and cached code is only used with the sources that it was compiled
from (``compat.torch_compile.separate_cached_code``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define_composite(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator ``rapidformer::name``, whose schema follows from the function's annotations."""
    full_name = f"rapidformer::{name}"
    torch.library.define(full_name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(full_name, "CompositeImplicitAutograd", function)
    operator: Callable[..., Any] = getattr(torch.ops.rapidformer, name).default
    return operator
