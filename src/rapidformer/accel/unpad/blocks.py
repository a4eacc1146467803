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
from rapidformer.overlay import extend, get_fact, get_own_class, put_fact, remove


@dataclass(frozen=True)
class _Place:
    """Where a block is in its stack.

    A fact on the block rather than part of its class: equal blocks share one compiled graph.
    """

    is_read: bool
    """Whether other code than the next block may get its output: it is in its padded shape then."""
    names: tuple[str, ...]
    """The block's positional arguments."""


def extend_blocks(model: nn.Module, plan: ModelPlan) -> None:
    """Let the blocks of a model run on real tokens."""
    for block, place in _list_blocks(model, plan):
        extend(block, "unpad", _build_block, is_shared=True)
        put_fact(block, place)


def restore_blocks(model: nn.Module, plan: ModelPlan) -> None:
    """Undo ``extend_blocks``."""
    for block in plan.get_blocks(model):
        remove(block, "unpad")


def _build_block(cls: Any) -> dict[str, Any]:
    return {"__call__": functools.partialmethod(_run_block, cls)}


def _run_block(self: nn.Module, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Pack the arguments of a call with a ``RowMask``, and unpack the last block's output."""
    mask = next((v for v in (*args, *kwargs.values()) if isinstance(v, RowMask)), None)
    place = get_fact(self, _Place)
    if mask is None:
        output = cls.__call__(self, *args, **kwargs)
        if place.is_read:
            record_padded(self, output[0] if isinstance(output, tuple) else output)
        return output
    rows = mask.rows
    hidden = args[0] if args else kwargs["hidden_states"]
    encoder = next((m.keys for m in (*args, *kwargs.values()) if _reads_encoder(m)), None)

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
    given = [convert(name, value) for name, value in zip(names, args, strict=False)]
    named = {name: convert(name, value) for name, value in kwargs.items()}
    output = cls.__call__(self, *given, **named)
    if not place.is_read:
        return output
    if isinstance(output, tuple):
        return (start(output[0], rows, self), *output[1:])
    return start(output, rows, self)


def _has_tokens(value: Any, rows: Rows) -> bool:
    """Whether a value has exactly the real tokens of these rows."""
    is_lazy = isinstance(value, Unpadded) and value.is_lazy and not value.is_flat
    return is_lazy and value.token_layout.places is rows.places


def _reads_encoder(value: Any) -> bool:
    """Whether an argument is the mask of a decoder's attention to its encoder."""
    return isinstance(value, RowMask) and value.keys is not None


def _list_blocks(model: Any, plan: ModelPlan) -> list[tuple[nn.Module, _Place]]:
    """Each block, and where it is in its stack."""
    stacks: dict[str, list[nn.Module]] = defaultdict(list)
    for name, block in zip(plan.blocks, plan.get_blocks(model), strict=True):
        stacks[name.rpartition(".")[0]].append(block)
    return [
        (
            block,
            _Place(
                is_read=block is stack[-1] or not _is_library_code(model, name),
                names=find_argument_names(block),
            ),
        )
        for name, stack in stacks.items()
        for block in stack
    ]


def _is_library_code(model: nn.Module, blocks: str) -> bool:
    """Whether transformers' own code passes hidden states from block to block."""
    owner = get_own_class(model.get_submodule(blocks.rpartition(".")[0]))
    return str(owner.forward.__module__).startswith("transformers.")
