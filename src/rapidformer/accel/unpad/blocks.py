"""Run blocks on real tokens: the first one removes padding, and the last one puts it back.

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
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.accel.unpad.padding_observer import observe_output
from rapidformer.accel.unpad.sides import find_stacks, is_encoder_decoder
from rapidformer.models.plan import ModelPlan
from rapidformer.overlay import extend, get_fact, put_fact, remove


@dataclass(frozen=True)
class _Place:
    """Where a block is in its stack.

    A fact on the block rather than part of its class: equal blocks share one compiled graph.
    """

    is_last: bool
    is_decoder: bool
    """Whether it is in the decoder of a model that has an encoder too."""
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
        if place.is_last:
            hidden = output[0] if isinstance(output, tuple) else output
            observe_output(hidden, is_decoder=place.is_decoder)
        return output
    rows = mask.rows
    hidden = args[0] if args else kwargs["hidden_states"]
    encoder = next((m.keys for m in (*args, *kwargs.values()) if _reads_encoder(m)), None)

    def convert(name: str, value: Any) -> Any:
        # Only the first block gets padded hidden states. Other arguments have their own rule, since
        # a batch may have as many real tokens as a padded row has columns.
        if value is hidden:
            return rows.pack(value) if rows.is_padded(value) else value
        if encoder is not None and name == "encoder_hidden_states":
            return encoder.pack_argument(value)
        return rows.pack_argument(value)

    names = (*place.names, *[""] * len(args))
    given = [convert(name, value) for name, value in zip(names, args, strict=False)]
    named = {name: convert(name, value) for name, value in kwargs.items()}
    output = cls.__call__(self, *given, **named)
    if not place.is_last:
        return output
    if isinstance(output, tuple):
        return (rows.unpack(output[0]), *output[1:])
    return rows.unpack(output)


def _reads_encoder(value: Any) -> bool:
    """Whether an argument is the mask of a decoder's attention to its encoder."""
    return isinstance(value, RowMask) and value.keys is not None


def _list_blocks(model: Any, plan: ModelPlan) -> list[tuple[nn.Module, _Place]]:
    """Each block, and where it is in its stack."""
    stacks: dict[str, list[nn.Module]] = defaultdict(list)
    for name, block in zip(plan.blocks, plan.get_blocks(model), strict=True):
        stacks[name.rpartition(".")[0]].append(block)
    both = find_stacks(model) if is_encoder_decoder(model) else None
    decoder = set() if both is None else set(both[1].modules())
    return [
        (
            block,
            _Place(
                is_last=block is stack[-1],
                is_decoder=block in decoder,
                names=find_argument_names(block),
            ),
        )
        for stack in stacks.values()
        for block in stack
    ]
