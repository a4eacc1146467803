"""One step of a recorded build: the operation, its memory, its random numbers.

Tensors are identified by their place in a piece of memory, never by the object. Parameters, views
and detached copies of one tensor are therefore the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rapidformer.compat.torch_dispatch import get_schema, tree_leaves, tree_map_only

Spans = Sequence[Sequence[tuple[int, int]]]
"""A part of a tensor: for each dimension, the ranges that belong to it, in order."""

META = torch.device("meta")
CPU = torch.device("cpu")


class RecordingError(Exception):
    """Something only a plain build can do."""


class PartialSource(Protocol):
    """A source of a whole tensor that can also be read in part, such as a file."""

    def __call__(self) -> Tensor: ...

    def read(self, spans: Spans) -> Tensor: ...


@dataclass(frozen=True)
class View:
    """A tensor by its place in a piece of memory: views need no steps of their own."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Blank:
    """A tensor of which only the shape matters."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True, eq=False)
class Step:
    """An operation with its arguments; recorded tensors are identified by their place."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[View]
    """New memory that the step returns; empty if it writes into existing memory."""
    random_state: Tensor | None
    overwrites: bool


def take(whole: Tensor, spans: Spans) -> Tensor:
    """The part of a tensor given by the spans."""
    for dim, stretches in enumerate(spans):
        if list(stretches) != [(0, whole.shape[dim])]:
            parts = [whole.narrow(dim, start, end - start) for start, end in stretches]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def find_written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operation writes into."""
    written = []
    for position, argument in enumerate(get_schema(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return written


def to_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(META), values)


def on_meta(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if any(argument.name == "device" for argument in get_schema(function).arguments):
        kwargs["device"] = META
    return kwargs


def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "device" not in kwargs:
        return kwargs
    return {**kwargs, "device": CPU}
