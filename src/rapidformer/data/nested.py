"""Tensors in dictionaries, lists and tuples of any depth; torch's own pytree is private."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def iterate_tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from iterate_tensors(value)
    elif isinstance(nested, (list, tuple)):
        for value in nested:
            yield from iterate_tensors(value)


def map_tensors(nested: Any, change: Callable[[str, Tensor], Any], path: str = "") -> Any:
    """The same with other tensors: ``change`` gets each one's path and the tensor."""
    if isinstance(nested, Tensor):
        return change(path, nested)
    if isinstance(nested, Mapping):
        made = {key: map_tensors(value, change, join(path, key)) for key, value in nested.items()}
        # Hugging Face's BatchEncoding and similar allow batch.input_ids.
        return type(nested)(made) if isinstance(nested, UserDict) else made
    if isinstance(nested, (list, tuple)):
        items = [map_tensors(value, change, join(path, i)) for i, value in enumerate(nested)]
        return type(nested)(*items) if hasattr(nested, "_fields") else type(nested)(items)
    return nested


def join(path: str, key: object) -> str:
    """The path of an entry."""
    return f"{path}.{key}" if path else str(key)
