"""Run blocks on real tokens: the first one removes padding, and the last one returns `Unpadded`.

A call is unpadded if its attention mask is a ``RowMask``. Every other call runs as it would without
the switch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from rapidformer.accel.context.arguments import find_argument_names
from rapidformer.accel.unpad.calls import record_padded
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.accel.unpad.on_demand import Unpadded, settle, start
from rapidformer.accel.unpad.rows import Rows
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import extend, get_fact, get_own_class, put_fact


@dataclass(frozen=True)
class _Place:
    """Where a block is in its stack.

    A fact on the block rather than part of its class: equal blocks share one compiled graph.
    """

    is_read: bool
    """Whether other code than the next block may get its output: it is in its padded shape then."""
    names: tuple[str, ...]
    """The block's positional arguments."""


def extend_blocks(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    """Let the blocks of a model run on real tokens; returns them."""
    stacks: dict[str, list[nn.Module]] = defaultdict(list)
    blocks = plan.get_blocks(model)
    for name, block in zip(plan.blocks, blocks, strict=True):
        stacks[name.rpartition(".")[0]].append(block)
    for name, stack in stacks.items():
        # Whether transformers' own code passes hidden states from block to block.
        owner = get_own_class(model.get_submodule(name.rpartition(".")[0]))
        is_own = str(owner.forward.__module__).startswith("transformers.")
        for block in stack:
            is_read = block is stack[-1] or not is_own
            extend(block, "unpad", _build_block, is_shared=True)
            put_fact(block, _Place(is_read=is_read, names=find_argument_names(block)))
    return blocks


def _build_block(cls: Any) -> dict[str, Any]:
    return {"__call__": functools.partialmethod(_run_block, cls)}


def _run_block(self: nn.Module, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Pack the arguments of a call with a ``RowMask``, and unpack the last block's output."""
    masks = [value for value in (*args, *kwargs.values()) if isinstance(value, RowMask)]
    place = get_fact(self, _Place)
    if not masks:
        output = cls.__call__(self, *args, **kwargs)
        if place.is_read:
            record_padded(self, output[0] if isinstance(output, tuple) else output)
        return output
    rows = masks[0].rows
    hidden = args[0] if args else kwargs["hidden_states"]
    # The rows of a decoder's mask for its attention to the encoder.
    encoder = next((mask.keys for mask in masks if mask.keys is not None), None)

    def convert(name: str, value: Any) -> Any:
        # Only the first block gets padded hidden states. Other arguments have their own rule, since
        # a batch may have as many real tokens as a padded row has columns.
        if value is hidden:
            if _has_tokens(value, rows):
                return value.tokens
            value = settle(value)
            return rows.pack(value) if rows.is_padded(value) else value
        side = encoder if encoder is not None and name == "encoder_hidden_states" else rows
        return value.tokens if _has_tokens(value, side) else side.pack_argument(settle(value))

    names = (*place.names, *[""] * len(args))
    packed = [convert(name, value) for name, value in zip(names, args, strict=False)]
    named = {name: convert(name, value) for name, value in kwargs.items()}
    output = cls.__call__(self, *packed, **named)
    if not place.is_read:
        return output
    if isinstance(output, tuple):
        return (start(output[0], rows, self), *output[1:])
    return start(output, rows, self)


def _has_tokens(value: Any, rows: Rows) -> bool:
    """Whether a value has exactly the real tokens of these rows."""
    is_lazy = isinstance(value, Unpadded) and value.is_lazy and not value.is_flat
    return is_lazy and value.token_layout.places is rows.places
