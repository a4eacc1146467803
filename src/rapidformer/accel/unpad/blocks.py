"""Blocks that run on real tokens: arguments are packed, and the last one's output unpacked.

Attention by one of transformers' functions takes the rows as they are. Attention in a model's own
code (GPT-J, Bloom, Falcon, and whatever else multiplies queries by keys itself) does not: there,
rows are padded for the attention module alone, and everything else in a block computes on real
tokens. Layers that scan have a way of their own (``scanned_rows.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.context.arguments import find_argument_names
from rapidformer.accel.unpad.calls import record_padded
from rapidformer.accel.unpad.dropout import use_bits
from rapidformer.accel.unpad.kernels import get_current_rows, inside, use_rows
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.accel.unpad.on_demand import lacks_padding, settle, start
from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.scanned_rows import find_scanning, run_scanning, suits
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.models.plan import (
    ModelPlan,
    find_outermost,
    find_owner,
    runs_in_library_code,
    skips_blocks,
)
from rapidformer.overlay import drop_fact, extend, get_fact, get_own_class, put_fact, remove

_PACKED: ContextVar[Rows | None] = ContextVar("packed", default=None)
"""The rows of the block that runs now, if a part of it gets them otherwise."""
_IN_OWNER: ContextVar[bool] = ContextVar("in_owner", default=False)
"""Whether transformers' own code hands hidden states from block to block."""


@dataclass(frozen=True)
class _Place:
    """Where a block is in its stack: a fact, since equal blocks share one compiled class."""

    is_read: bool
    """Whether other code than the next block may get its output: it is in its padded shape then."""
    gets_padded: bool
    """Whether its input may be in that shape."""
    names: tuple[str, ...]
    """The block's positional arguments."""
    is_by_call: bool
    """Whether its rows come from the call of the model: its arguments do not show them."""
    is_watched: bool
    """Whether code of the user's own may run it, outside the module that holds its list."""


def group_by_stack(plan: ModelPlan) -> list[list[str]]:
    """The names of a model's blocks, those of each stack together."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for name in plan.blocks:
        stacks[name.rpartition(".")[0]].append(name)
    return list(stacks.values())


def find_attention(block: nn.Module) -> list[nn.Module]:
    """A block's attention modules by their classes' names; of nested ones, the innermost."""
    found = [
        (name, module)
        for name, module in block.named_modules()
        if name and "attention" in get_own_class(module).__name__.lower()
    ]
    outer = {name.rpartition(".")[0] for name, _ in found}
    return [module for name, module in found if name not in outer]


def extend_blocks(
    model: nn.Module, stacks: Sequence[Sequence[str]], *, pads_attention: bool = False,
    scans: bool = False,
) -> Callable[[], None]:  # fmt: skip
    """Let the blocks of a model run on real tokens; returns how to undo it."""
    extended = []
    has_own_code = not is_own_model(get_own_class(model))
    for stack in stacks:
        # If blocks are skipped, any may be the first or the last.
        is_own = runs_in_library_code(model, stack[0]) and not skips_blocks(model)
        is_watched = is_own and has_own_code
        if is_watched:
            owner = find_owner(model, stack[0])
            extend(owner, "unpad", _build_owner)
            extended.append(owner)
        for name in stack:
            block = model.get_submodule(name)
            for module in find_attention(block) if pads_attention else ():
                extend(module, "unpad", _build_attention, is_shared=True)
                extended.append(module)
            for module in find_scanning(block) if scans else ():
                extend(module, "unpad", _build_scanning, is_shared=True)
                extended.append(module)
            is_read = name == stack[-1] or not is_own
            is_on_cpu = all(p.device.type == "cpu" for p in block.parameters())
            extend(block, "unpad", _build_cpu_block if is_on_cpu else _build_block, is_shared=True)
            place = _Place(
                is_read=is_read,
                gets_padded=name == stack[0] or not is_own,
                names=find_argument_names(block),
                is_by_call=pads_attention or scans,
                is_watched=is_watched,
            )
            put_fact(block, place)
            extended.append(block)

    def restore() -> None:
        for module in reversed(extended):
            remove(module, "unpad")
            drop_fact(module, _Place)

    return restore


def _build_block(cls: Any) -> dict[str, Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_block(self, cls, *args, **kwargs)

    return {"__call__": call}


def _build_cpu_block(cls: Any) -> dict[str, Any]:
    # ``forward``, which runs again wherever a block is recomputed, by whomever.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        masks = _find_masks(args, kwargs)
        with use_bits(masks[0].rows if masks else _PACKED.get()):
            return cls.forward(self, *args, **kwargs)

    return {**_build_block(cls), "forward": forward}


def _build_owner(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with inside(_IN_OWNER, True):
            return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


def _find_masks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RowMask]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, RowMask)]


def _run_block(self: nn.Module, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Pack a block's arguments, and unpack the last block's output, if padding is removed now."""
    place = get_fact(self, _Place)
    is_outside = place.is_watched and not _IN_OWNER.get()
    if is_outside:
        place = replace(place, is_read=True, gets_padded=True)
    hidden: Any = args[0] if args else kwargs.get("hidden_states")
    masks = _find_masks(args, kwargs)
    rows = masks[0].rows if masks else None
    within: AbstractContextManager[Any] = nullcontext()
    if place.is_by_call:
        # Outside, the mask may be another one: it is among arguments, but not as a ``RowMask``.
        rows = None if is_outside else _find_rows(hidden)
        within = inside(_PACKED, rows)
    if rows is None:
        output = cls.__call__(self, *args, **kwargs)
        if place.is_read:
            record_padded(self, output[0] if isinstance(output, tuple) else output)
        return output
    # The rows of a decoder's mask for its attention to the encoder.
    encoder = next((mask.keys for mask in masks if mask.keys is not None), None)

    def convert(name: str, value: Any) -> Any:
        # Only the first block gets padded hidden states. Other arguments have their own rule, since
        # a batch may have as many real tokens as a padded row has columns.
        if value is hidden:
            if _has_tokens(value, rows):
                return value.tokens
            value = settle(value)
            # One row may have as many tokens as columns.
            is_packed = rows.is_packed(value) and not place.gets_padded
            return rows.pack(value) if rows.is_padded(value) and not is_packed else value
        side = encoder if encoder is not None and name == "encoder_hidden_states" else rows
        return value.tokens if _has_tokens(value, side) else side.pack_argument(settle(value))

    names = (*place.names, *[""] * len(args))
    packed = [convert(name, value) for name, value in zip(names, args, strict=False)]
    named = {name: convert(name, value) for name, value in kwargs.items()}
    with within:
        output = cls.__call__(self, *packed, **named)
    if not place.is_read:
        return output
    if isinstance(output, tuple):
        return (start(output[0], rows, self), *output[1:])
    return start(output, rows, self)


def _has_tokens(value: Any, rows: Rows) -> bool:
    """Whether a value has exactly the real tokens of these rows."""
    return lacks_padding(value) and not value.is_flat and value.token_layout.places is rows.places


def extend_inner_models(model: nn.Module) -> list[nn.Module]:
    """Let transformers' models inside a model use the batch's rows with its mask only."""
    inner = [found for found in find_outermost(model) if found is not model]
    for found in inner:
        extend(found, "unpad", _build_inner)
    return inner


def _build_inner(cls: Any) -> dict[str, Any]:
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows = get_current_rows()
        origin = None if rows is None else rows.origin
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if origin is None or origin.allows(given.get("attention_mask")):
            return cls.forward(self, *args, **kwargs)
        with use_rows(None):
            return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


# ---- attention that takes padded rows only -------------------------------------------------------


def _find_rows(hidden: Any) -> Rows | None:
    """The rows that the model runs on now, if these hidden states are theirs."""
    rows = get_current_rows()
    if rows is None or not isinstance(hidden, Tensor):
        return None
    is_theirs = _has_tokens(hidden, rows) or rows.is_padded(hidden) or rows.is_packed(hidden)
    return rows if is_theirs else None


def _build_attention(cls: Any) -> dict[str, Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows, run = _PACKED.get(), functools.partial(cls.__call__, self)
        return run(*args, **kwargs) if rows is None else _run_padded(run, rows, args, kwargs)

    return {"__call__": call}


def _run_padded(
    run: Callable[..., Any], rows: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    padded = [rows.pad_argument(value) for value in args]
    named = {name: rows.pad_argument(value) for name, value in kwargs.items()}
    output = run(*padded, **named)
    if isinstance(output, tuple):
        return (rows.pack(output[0]), *output[1:])
    return rows.pack(output)


# ---- layers that scan ----------------------------------------------------------------------------


def _build_scanning(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows, run = _PACKED.get(), functools.partial(cls.forward, self)
        if rows is None:
            return run(*args, **kwargs)
        if not suits(self, rows):
            return _run_padded(run, rows, args, kwargs)
        return run_scanning(self, run, rows, args, kwargs)

    # Which rows there are is not among what a compiler looks at.
    return {"forward": torch.compiler.disable(forward)}
