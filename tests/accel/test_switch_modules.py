"""Every row of the table of switches has the code that applies it, in one form."""

from __future__ import annotations

import importlib
import inspect
import typing

import pytest

from rapidformer.accel.assembly import Assembly
from rapidformer.config.switches import SWITCHES
from rapidformer.engine import RapidformerEngine

from .models import make

MODULES = [switch.module for switch in SWITCHES if switch.module]


@pytest.mark.parametrize("name", MODULES)
def test_every_row_that_names_a_module_finds_its_apply(name: str) -> None:
    module, _, function = name.partition(":")
    apply = getattr(importlib.import_module(f"rapidformer.accel.{module}"), function or "apply")
    assert list(inspect.signature(apply).parameters) == ["assembly"]
    hints = typing.get_type_hints(apply)
    assert hints["assembly"] is Assembly
    assert hints["return"] in (str, str | None, type(None))


def test_start_up_lines_follow_the_order_of_the_rows() -> None:
    """In the order in which they were applied, each with its row's name in front."""
    engine = RapidformerEngine(
        args=["--compile", "--compile-backend", "eager", "--recompute-granularity", "selective",
              "--recompute-interval", "2", "--device", "cpu", "--log-level", "error"]
    )  # fmt: skip
    engine.model.compose_for_evaluation(make("bert"))
    assert engine.model.parallelized.switches == [
        "precision: fp32",
        "recompute: selective, 1 in 2 of 3 blocks",
        "compilation: torch.compile of 3 blocks with eager",
        "dynamic shape: blocks compute on real tokens only",
        "always: host masks",
    ]
    engine.close()
