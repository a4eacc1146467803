"""Overlays: in a fixed order, listed, removable, and invisible to the object's owner."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rapidformer
from rapidformer.overlay import (
    ORDER,
    drop_fact,
    extend,
    find_fact,
    get_fact,
    list_layers,
    put_fact,
    remove,
)


class Doubler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return self.factor * inputs + shift


def add_one(cls: Any) -> dict[str, Any]:
    return {"__call__": lambda self, *args, **kwargs: cls.__call__(self, *args, **kwargs) + 1}


def times_ten(cls: Any) -> dict[str, Any]:
    return {"__call__": lambda self, *args, **kwargs: cls.__call__(self, *args, **kwargs) * 10}


def test_a_call_enters_at_the_outermost_layer() -> None:
    module = Doubler()
    extend(module, "recompute", add_one)
    extend(module, "autocast", times_ten)
    assert module(torch.tensor(3.0)).item() == 70.0
    assert list_layers(module) == ["recompute", "autocast"]


def test_a_layer_out_of_order_is_refused() -> None:
    module = Doubler()
    with pytest.raises(AssertionError, match="'negation' needs a line in ORDER"):
        extend(module, "negation", add_one)
    extend(module, "autocast", times_ten)
    with pytest.raises(AssertionError, match="recompute must be added to Doubler before autocast"):
        extend(module, "recompute", add_one)
    assert list_layers(module) == ["autocast"]


def test_the_object_stays_what_it_was() -> None:
    module = Doubler()
    extend(module, "recompute", add_one)
    assert isinstance(module, Doubler)
    assert type(module).__name__ == "Doubler"
    assert type(module).__module__ == Doubler.__module__
    assert list(inspect.signature(module.forward).parameters) == ["inputs", "shift"]
    assert list(module.state_dict()) == ["factor"]
    twin = copy.deepcopy(module)
    assert twin is not module
    assert list_layers(twin) == ["recompute"]
    assert twin(torch.tensor(3.0)).item() == 7.0


def test_a_layer_is_taken_off_from_the_top_or_from_below() -> None:
    module = Doubler()
    extend(module, "recompute", add_one)
    extend(module, "autocast", times_ten)
    remove(module, "recompute")
    assert list_layers(module) == ["autocast"]
    assert module(torch.tensor(3.0)).item() == 60.0
    remove(module, "autocast")
    assert type(module) is Doubler


def test_a_layer_under_another_librarys_class_stays_where_it_is() -> None:
    module: Any = Doubler()
    extend(module, "recompute", add_one)
    module.__class__ = type("Foreign", (type(module),), {})
    with pytest.raises(AssertionError, match="cannot be removed from Foreign"):
        remove(module, "recompute")
    assert list_layers(module) == ["recompute"]


def test_objects_of_one_class_share_an_overlay() -> None:
    first, second, third = Doubler(), Doubler(), Doubler()
    for module in (first, second):
        extend(module, "recompute", add_one, is_shared=True)
    extend(third, "recompute", add_one)
    assert type(first) is type(second)
    assert type(first) is not type(third)


def test_nothing_else_swaps_a_class() -> None:
    """Everything that extends an object in place goes through the overlay, and has a layer."""
    root = Path(rapidformer.__file__).parent
    swapping = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "__class__ =" in path.read_text(encoding="utf-8")
    ]
    assert set(swapping) <= {"overlay.py"}
    text = "\n".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    assert [layer for layer in ORDER if f'"{layer}", ' not in text] == []


class Weight:
    def __init__(self, value: int) -> None:
        self.value = value


def test_facts_stay_on_their_object_and_in_its_copies() -> None:
    module = Doubler()
    assert find_fact(module, Weight) is None
    put_fact(module, Weight(1))
    put_fact(module, Weight(2))
    put_fact(module, "another type")
    twin = copy.deepcopy(module)
    get_fact(twin, Weight).value = 3
    assert (get_fact(module, Weight).value, get_fact(twin, Weight).value) == (2, 3)
    drop_fact(module, Weight)
    assert find_fact(module, Weight) is None
    assert find_fact(module, str) == "another type"
