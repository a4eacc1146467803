"""Define torch operators that torch.compile can both trace into and cache.

A graph may call any Python function, but torch then never reuses compiled code of that graph in
another run. It does if the function is an operator. Declared as a composite of other operators, it
is still traced into, so its operations are fused and differentiated as if the graph had them.

The cache knows the operator by its name and arguments only. So everything that decides what it
does has to be an argument. Its code is covered by a digest of our sources in the cache's key.
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
    operator: Callable[..., Any] = getattr(torch.ops.rapidformer, name).default
    return operator
