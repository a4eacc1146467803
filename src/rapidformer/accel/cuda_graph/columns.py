"""Add columns of padding to a batch: each CUDA graph replays batches of one of a few widths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional

from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.rows import NO_SIZES, Sizes, round_up, round_width
from rapidformer.data.batch import IGNORED_LABEL, get_host_copy
from rapidformer.data.nested import map_tensors
from rapidformer.overlay import find_fact

_PADDED_WIDTHS = {"least": 64, "sizes": 2}
"""How widths are rounded up on which attention is computed."""
_SIDE_WIDTHS = {"least": 16, "sizes": 2}
"""The same for both sides of an encoder-decoder model that runs padded: there is a graph for each
pair."""
_LIMITS = (
    "max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings",
    "max_source_positions", "max_target_positions",
)  # fmt: skip
"""Entries of a model's configuration: how long a row can be."""


@dataclass(frozen=True)
class Filling:
    """A fact on a model: whether padding added to a batch leaves its results unchanged."""

    fills: bool
    """If a part of it runs as rows of its own."""
    widens: bool
    """If all of it is computed. That of a model of the user's own is not tried beforehand."""
    limits: tuple[int, ...] = ()
    """Lengths that may be the longest which a model of the user's own takes."""


def find_filling(model: Any) -> Filling:
    """What was found out about a model."""
    return find_fact(model, Filling) or Filling(fills=False, widens=False)


class Column(NamedTuple):
    """How wide a tensor of a batch becomes, and what it is filled with."""

    width: int
    fill: int


Columns = Mapping[str, Column]


def choose_columns(
    model: Any,
    batch: Mapping[str, Any],
    mask: Tensor,
    *,
    factor: float = 1.0,
    least: Sizes = NO_SIZES,
) -> Columns:
    """The next width of a batch with this mask, made ``factor`` times as wide; empty if unknown."""
    width = max(math.ceil(factor * mask.shape[1]), least.columns)
    removal = find_fact(model, Removal)
    if removal is None or not removal.is_on or removal.pads_attention:
        wide = round_up(width, **_PADDED_WIDTHS)
    else:  # padding is cheap in a batch that runs unpadded
        wide = round_width(width, len(mask))
    wide = _limit(model, mask.shape[1], wide)
    fills = {"token_type_ids": 0, "labels": IGNORED_LABEL, **_list_fills(model, "")}
    shaped = {
        name
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:2] == mask.shape
    }
    if any(name not in fills or batch[name].dim() != 2 for name in shaped):
        return {}
    ignored = _find_ignored_label(model, batch["labels"], mask) if "labels" in shaped else 0
    if ignored is None:
        return {}
    fills["labels"] = ignored
    return {name: Column(wide, fills[name]) for name in shaped}


def choose_sides(
    model: Any,
    batch: Mapping[str, Any],
    *,
    factor: float = 1.0,
    least: Sizes = NO_SIZES,
    is_padded: bool = True,
) -> Columns:
    """As ``choose_columns``, for both sides of an encoder-decoder model."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    encoder, decoder = _list_fills(model, ""), _list_fills(model, "decoder_")
    decoder["labels"] = IGNORED_LABEL
    known = {**encoder, **decoder}
    if "attention_mask" not in tensors or "labels" not in tensors:
        return {}  # padding could be anywhere
    if any(name not in known or value.dim() != 2 for name, value in tensors.items()):
        return {}
    columns: dict[str, Column] = {}
    sides = (encoder, "attention_mask", least.columns), (decoder, "labels", least.labels)
    for side, first, at_least in sides:
        own = tensors[first].shape[1]
        if any(tensors[name].shape[1] != own for name in side if name in tensors):
            return {}
        width = max(math.ceil(factor * own), at_least)
        wide = round_up(width, **_SIDE_WIDTHS) if is_padded else round_width(width)
        wide = _limit(model, own, wide)
        columns |= {name: Column(wide, fill) for name, fill in side.items() if name in tensors}
    return columns


def widen(batch: Any, columns: Columns) -> Any:
    """A copy of a batch with columns added."""

    def change(name: str, tensor: Tensor) -> Tensor:
        column = columns.get(name)
        return tensor.clone() if column is None else pad(tensor, column)

    return map_tensors(batch, change)


def pad(tensor: Tensor, column: Column | None) -> Tensor:
    """Add columns on the right."""
    if column is None:
        return tensor
    return functional.pad(tensor, (0, column.width - tensor.shape[1]), value=column.fill)


def pad_array(array: np.ndarray[Any, Any], column: Column | None) -> np.ndarray[Any, Any]:
    """``pad`` for an array."""
    if column is None:
        return array
    wide = np.full((len(array), column.width), column.fill, dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide


def _list_fills(model: Any, prefix: str) -> dict[str, int]:
    pad_token = getattr(getattr(model, "config", None), "pad_token_id", None)
    token = pad_token if isinstance(pad_token, int) and pad_token >= 0 else 0
    return {f"{prefix}input_ids": token, f"{prefix}attention_mask": 0}


def _find_ignored_label(model: Any, labels: Tensor, mask: Tensor) -> int | None:
    """The one label that padding has. A loss of the user's own need not ignore -100."""
    is_own = bool(find_filling(model).limits)
    # Not with NumPy, which has no bf16; labels may be numbers to be learnt.
    of_padding = get_host_copy(labels)[get_host_copy(mask) == 0].unique().tolist()
    is_one = len(of_padding) == 1 and float(of_padding[0]).is_integer()
    if is_one and (is_own or of_padding[0] < 0):
        return int(of_padding[0])
    return None if is_own else IGNORED_LABEL


def _limit(model: Any, given: int, wide: int) -> int:
    """No wider than the model's positions allow, and at least as wide as it is."""
    config = getattr(model, "config", None)
    limits = [getattr(config, name, None) for name in _LIMITS]
    limits += [limit for limit in find_filling(model).limits if limit >= given]
    return max(given, min([wide, *(limit for limit in limits if isinstance(limit, int))]))
