"""The one way to extend an object in place: overlays, in one order, that can be taken off again.

An overlay is a subclass of the object's own class, put in its place: a model, block, optimizer or
scheduler stays the object that its owner holds, with its names, ``isinstance``, signature and
``copy.deepcopy``. ``ORDER`` is the order in which overlays lie on an object, innermost first: a
call enters at the outermost one. Putting one on out of order is an error in our code.

    extend(block, "recompute", build_members)      # build_members(cls) -> {"__call__": ...}
    list_layers(block)                             # ["split", "recompute"]
    remove(block, "recompute")
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ORDER = {
    "split": "reads its share of a split layer's weights, and exchanges activations",
    "statistics": "normalises by the rows of all ranks",
    "recompute": "computes a block again in the backward pass",
    "offload": "keeps what a block saves for its backward pass in the host's memory",
    "context": "holds this process's tokens of each sequence",
    "experts": "generates in step with the processes that share its experts",
    "sharding": "gathers sharded weights to generate",
    "autocast": "runs in 16 bits over fp32 weights",
    "deepspeed": "runs through DeepSpeed's engine",
    "stages": "runs only the blocks of this process's stage",
    "recording": "notes what a block is given, while the model is looked at",
    "update": "steps when an update is due (optimizers and schedulers)",
}
"""Layer -> what an object under it does, innermost first."""

Build = Callable[[Any], dict[str, Any]]
"""From the class beneath to the members of the overlay, which may call that class."""
_MARK = "__rapidformer_overlay__"
_RANKS = {layer: rank for rank, layer in enumerate(ORDER)}


@dataclass(frozen=True)
class Overlay:
    """One layer on an object."""

    layer: str
    beneath: Any
    """The class that the object had before."""
    build: Build
    styles: tuple[type, ...]
    """Classes that stand before that one."""
    is_shared: bool


def extend(
    target: Any, layer: str, build: Build, *, styles: tuple[type, ...] = (), is_shared: bool = False
) -> None:
    """Put an overlay on an object.

    With ``is_shared``, objects of one class that are given the same ``build`` and styles get the
    same class: equal blocks then share one compiled graph. Such a ``build`` is kept for good.
    """
    outer = [each for each in list_layers(target) if _RANKS[each] > _RANKS[layer]]
    if outer:
        raise AssertionError(f"{layer} must be put on {type(target).__name__} before {outer[0]}")
    make: Callable[..., Any] = _get_shared_class if is_shared else _build_class
    target.__class__ = make(type(target), layer, build, styles, is_shared)


def list_layers(target: Any) -> list[str]:
    """The layers that lie on an object, innermost first."""
    marks = (vars(cls).get(_MARK) for cls in reversed(type(target).__mro__))
    return [mark.layer for mark in marks if mark is not None]


def remove(target: Any, layer: str) -> None:
    """Take the outermost overlay of a layer off; those above it stay."""
    above: list[Overlay] = []
    cls: Any = type(target)
    while True:
        mark: Overlay | None = vars(cls).get(_MARK)
        if mark is None:
            raise AssertionError(f"{layer} cannot be taken off {cls.__name__}: it is not on top")
        cls = mark.beneath
        if mark.layer == layer:
            break
        above.append(mark)
    for each in reversed(above):
        make = _get_shared_class if each.is_shared else _build_class
        cls = make(cls, each.layer, each.build, each.styles, each.is_shared)
    target.__class__ = cls


def _build_class(
    cls: Any, layer: str, build: Build, styles: tuple[type, ...], is_shared: bool
) -> Any:
    overlay = Overlay(layer, cls, build, styles, is_shared)
    members = {"__module__": cls.__module__, _MARK: overlay, **build(cls)}
    return type(cls.__name__, (*styles, cls), members)


_get_shared_class: Callable[..., Any] = functools.cache(_build_class)
