"""The only way to extend an object in place: overlays, in a fixed order, that can be removed again.

An overlay is a subclass of the object's own class that takes its place: a model, block, optimizer
or scheduler stays the object its owner holds, with its names, ``isinstance``, signature and
``copy.deepcopy``. ``ORDER`` lists the overlays of an object, innermost first: a call enters at the
outermost. Adding one out of order is a bug in our code.

    extend(block, "recompute", build_members)      # build_members(cls) -> {"__call__": ...}
    list_layers(block)                             # ["split", "recompute"]
    remove(block, "recompute")

What an overlay must know about its object is a fact: a value that the object itself keeps, one of
each type, so that ``copy.deepcopy`` takes it along.

    put_fact(layer, Split(mesh=mesh))
    get_fact(layer, Split).mesh
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

ORDER = {
    "prompt": "returns no logits for the learned tokens before a row",
    "pickle": "is the plain model in a file of torch.save",
    "masks": "lets transformers ask the host about padding instead of the device",
    "split": "uses its slice of a layer's weights, and exchanges activations",
    "fp8": "multiplies in 8 bits in training",
    "table": "takes the gradient of a small embedding table from a matrix product",
    "convolution": "multiplies Fourier transforms instead of convolving",
    "scans": "scans its tokens by products of chunks (Mamba-2, Qwen3.5)",
    "heads": "takes keys and values by slices, for which the host does not wait",
    "bias": "lays out a relative position bias as fused attention needs it",
    "positions": "scores relative positions without gathering them (DeBERTa)",
    "scores": "leaves attention scores of its own code to fused attention",
    "mixture": "multiplies each expert's tokens without reading how many there are",
    "kernels": "tries attention kernels in the order of its engine",
    "statistics": "normalises by the rows of all ranks",
    "loss": "leaves logits to the loss, which computes them chunk by chunk",
    "recompute": "computes a block again in the backward pass",
    "offload": "keeps what a block saves for its backward pass in host memory",
    "context": "holds this rank's tokens of each sequence",
    "unpad": "computes on real tokens only",
    "experts": "generates in step with the ranks that hold the other experts",
    "sharding": "gathers sharded weights to generate",
    "autocast": "runs in 16 bits on fp32 weights",
    "deepspeed": "runs through DeepSpeed's engine",
    "stages": "runs only the blocks of this rank's stage",
    "saving": "saves sharded weights whole",
    "recording": "records a block's inputs while the model is examined",
    "replay": "runs as CUDA graphs, inside a step or a prediction",
    "passes": "tells its graphs when a script's own loop calls it",
    "retired": "refuses to be used, since the model has another parameter instead",
    "update": "steps when an update is due (optimizers and schedulers)",
}
"""Layer -> what it makes an object do, innermost first."""

Build = Callable[[Any], dict[str, Any]]
"""From the class beneath to the members of the overlay, which may call that class."""
T = TypeVar("T")
_MARK = "__rapidformer_overlay__"
FACTS = "rapidformer_facts"
_RANKS = {layer: rank for rank, layer in enumerate(ORDER)}


@dataclass(frozen=True)
class Overlay:
    """One layer on an object."""

    layer: str
    beneath: Any
    """The class the object had before."""
    build: Build
    styles: tuple[type, ...]
    """Classes placed in front of that one."""
    is_shared: bool


def extend(
    target: Any, layer: str, build: Build, *, styles: tuple[type, ...] = (), is_shared: bool = False
) -> None:
    """Add an overlay to an object.

    With ``is_shared``, objects of one class with the same ``build`` and styles get the same class,
    so equal blocks share one compiled graph. Such a ``build`` is kept for the life of the process.
    """
    if layer not in ORDER:
        raise AssertionError(f"{layer!r} needs a line in ORDER, at its place among the others")
    outer = [other for other in list_layers(target) if _RANKS[other] > _RANKS[layer]]
    if outer:
        raise AssertionError(f"{layer} must be added to {type(target).__name__} before {outer[0]}")
    make: Callable[..., Any] = _get_shared_class if is_shared else _build_class
    target.__class__ = make(type(target), layer, build, styles, is_shared)


def list_layers(target: Any) -> list[str]:
    """The object's layers, innermost first."""
    marks = (vars(cls).get(_MARK) for cls in reversed(type(target).__mro__))
    return [mark.layer for mark in marks if mark is not None]


def remove(target: Any, layer: str) -> None:
    """Remove the outermost overlay of a layer; those above it stay."""
    above: list[Overlay] = []
    cls: Any = type(target)
    while True:
        mark: Overlay | None = vars(cls).get(_MARK)
        if mark is None:
            raise AssertionError(
                f"{layer} cannot be removed from {cls.__name__}: something else is on top"
            )
        cls = mark.beneath
        if mark.layer == layer:
            break
        above.append(mark)
    for each in reversed(above):
        make = _get_shared_class if each.is_shared else _build_class
        cls = make(cls, each.layer, each.build, each.styles, each.is_shared)
    target.__class__ = cls


@contextmanager
def without_layer(target: Any, layer: str) -> Iterator[None]:
    """Inside, an object lacks one of its layers."""
    cls = type(target)
    remove(target, layer)
    try:
        yield
    finally:
        target.__class__ = cls


def return_to(target: Any, cls: Any) -> None:
    """Remove everything on top of a class that an object had, ``fully_shard``'s class included."""
    if cls in type(target).__mro__:
        target.__class__ = cls


def get_own_class(target: Any) -> Any:
    """The class of an object without its overlays, and without the one that fully_shard adds."""
    cls: Any = type(target)
    while True:
        mark: Overlay | None = vars(cls).get(_MARK)
        if mark is not None:
            cls = mark.beneath
        elif len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
            cls = cls.__bases__[1]
        else:
            return cls


def put_fact(target: Any, fact: object) -> None:
    """Keep a fact on an object; it replaces one of the same type."""
    target.__dict__.setdefault(FACTS, {})[type(fact)] = fact


def find_fact(target: Any, kind: type[T]) -> T | None:
    """The object's fact of this type, if it has one."""
    facts: dict[type, Any] | None = target.__dict__.get(FACTS)
    return None if facts is None else facts.get(kind)


def get_fact(target: Any, kind: type[T]) -> T:
    """The object's fact of this type, which was put there."""
    return target.__dict__[FACTS][kind]


def drop_fact(target: Any, kind: type) -> None:
    """Forget the fact of this type, if the object has one."""
    facts = target.__dict__.get(FACTS, {})
    facts.pop(kind, None)
    if not facts:
        target.__dict__.pop(FACTS, None)


def _build_class(
    cls: Any, layer: str, build: Build, styles: tuple[type, ...], is_shared: bool
) -> Any:
    overlay = Overlay(layer, cls, build, styles, is_shared)
    own = {} if hasattr(cls, _MARK) else _build_own_members(cls)
    members = {"__module__": cls.__module__, _MARK: overlay, **own, **build(cls)}
    made = type(cls.__name__, (*styles, cls), members)
    if hasattr(cls, "generate") and "forward" not in members:
        _keep_signature(made, cls)
    return made


def _build_own_members(cls: Any) -> dict[str, Any]:
    """A module is copied with its overlays; pickle would not find their classes."""
    if not hasattr(cls, "named_modules"):
        return {}

    def copy_deeply(self: Any, memo: dict[int, Any]) -> Any:
        kind: Any = type(self)
        twin = memo[id(self)] = kind.__new__(kind)
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def copy_flatly(self: Any) -> Any:
        kind: Any = type(self)
        twin = kind.__new__(kind)
        twin.__setstate__(self.__getstate__().copy())
        return twin

    def refuse(self: Any, protocol: Any) -> Any:
        raise pickle.PicklingError(
            f"this {cls.__name__} is a part of a model that an engine has composed, and cannot be "
            "pickled alone: save the whole model, the part's state_dict(), or the part after "
            "engine.close()."
        )

    copies = {"__deepcopy__": copy_deeply, "__copy__": copy_flatly}
    has_own = (cls.__reduce_ex__, cls.__reduce__) != (object.__reduce_ex__, object.__reduce__)
    members = {name: copier for name, copier in copies.items() if not hasattr(cls, name)}
    return members if has_own else {"__reduce_ex__": refuse, **members}


def _keep_signature(made: Any, cls: Any) -> None:
    """Let a style's ``forward`` show what the model takes: ``generate`` looks for positions."""
    if made.forward is cls.forward:
        return

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(made, self).forward(*args, **kwargs)

    made.forward = forward


_get_shared_class: Callable[..., Any] = functools.cache(_build_class)
