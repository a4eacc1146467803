"""Refuse a depth that depends on the data (LayerDrop, early exit) under ZeRO.

All ranks gather a block's weights together. If one rank skips a block, its next call meets the
other ranks' call of another block: the run hangs, or continues with the wrong weights. So calls
with the same arguments must run the same blocks every time, which each rank checks before it
gathers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.compat.torch_dispatch import is_in_backward
from rapidformer.errors import ModelError

Call = tuple[bool, bool, int, frozenset[tuple[str, bool | str | None]]]


def require_steady_depth(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Raise if a call of the model runs other blocks than an earlier one like it."""
    depth = _Depth()
    skip = torch.compiler.disable
    model.register_forward_pre_hook(skip(depth.start), prepend=True, with_kwargs=True)
    model.register_forward_hook(skip(depth.finish))
    for name in blocks:
        block = model.get_submodule(name)
        if isinstance(block, FSDPModule):
            note = functools.partial(depth.note, name)
            block.register_forward_pre_hook(skip(note), prepend=True)


class _Depth:
    """Which blocks ran in calls of the model, by their arguments."""

    def __init__(self) -> None:
        self._known: dict[Call, list[str]] = {}
        self._call: Call | None = None
        self._run: list[str] = []

    def start(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        # Modes may choose blocks, and are the same on every rank; tensors are data.
        given = frozenset(
            (name, value if isinstance(value, bool | str) else None)
            for name, value in kwargs.items()
            if value is not None
        )
        self._call = (model.training, torch.is_grad_enabled(), len(args), given)
        self._run = []

    def note(self, name: str, *_: Any) -> None:
        if self._call is None or is_in_backward():  # a block on its own, or recomputed
            return
        expected = self._known.get(self._call)
        place = len(self._run)
        self._run.append(name)
        if expected is not None and (place >= len(expected) or expected[place] != name):
            raise _refuse(expected, self._run)

    def finish(self, model: nn.Module, args: Any, output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        expected = self._known.setdefault(call, self._run)
        if len(self._run) != len(expected):
            raise _refuse(expected, self._run)


def _refuse(expected: list[str], run: list[str]) -> ModelError:
    """The error that names the first block that differs."""
    place = next(
        (i for i, (a, b) in enumerate(zip(expected, run, strict=False)) if a != b), len(run)
    )
    before = expected[place] if place < len(expected) else "no further block"
    now = run[place] if place < len(run) else "no further block"
    return ModelError(
        f"the model ran {now}, but an earlier call with the same arguments ran "
        f"{before}: its depth depends on the data or on chance (LayerDrop, early exit). Under "
        "ZeRO/FSDP all ranks gather the weights of a block together, so every rank must run the "
        "same blocks. Turn it off (layerdrop=0), run every block and drop its result, or use "
        "data parallelism without ZeRO."
    )
