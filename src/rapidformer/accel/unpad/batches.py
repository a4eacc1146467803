"""Which batches can run without padding: those whose loss cannot change.

The model must get its labels, and every label must belong to a real token; or its caller promises
to read no padding (``promises.py``). A model that a CUDA graph replays cannot read its mask. So its
rows are read from the batch in host memory first, and attached to the mask, which is overwritten in
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.origin import note_origin
from rapidformer.accel.unpad.promises import find_labels, find_promise
from rapidformer.accel.unpad.rows import NO_SIZES, Mask, Rows, Sizes
from rapidformer.accel.unpad.sides import Sides, is_encoder_decoder, read_masks, read_sides
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.data.batch import IGNORED_LABEL, get_host_copy
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.watched import find_requested
from rapidformer.overlay import find_fact, get_own_class

_LEAST_PADDING = 0.05
"""Below this fraction of padding, removing it costs more than it saves."""
_FIXED = "rapidformer_fixed_rows"


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


class FixedRows(NamedTuple):
    """What the model would read off its mask, the same for every replay."""

    rows: Rows | Sides | None
    """None if the batch runs padded."""
    is_full: bool = False
    """Whether there is no padding."""
    labelled: int | None = None
    """How many tokens have a label at most; None: all may."""


def fix_rows(mask: Tensor, fixed: FixedRows) -> None:
    """Attach what the model would read off its mask."""
    setattr(mask, _FIXED, fixed)


def get_fixed_rows(mask: Any) -> FixedRows | None:
    """What was attached to a mask."""
    return getattr(mask, _FIXED, None)


def find_rows(model: Any, given: dict[str, Any], *, rounds_up: bool = False) -> Rows | None:
    """The rows of a batch if removing its padding cannot change the loss, otherwise None."""
    mask, labels, promise = given.get("attention_mask"), find_labels(given), find_promise(given)
    is_known = isinstance(labels, Tensor) or (promise is not None and promise.reads_all_tokens)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not is_known:
        return None
    if find_requested(model, given) or given.get("past_key_values") is not None:
        return None
    has_own_code = not is_own_model(get_own_class(model))
    fixed = get_fixed_rows(mask)
    if fixed is not None:
        if isinstance(fixed.rows, Rows) and has_own_code:
            note_origin(fixed.rows, mask, None)
        return fixed.rows if isinstance(fixed.rows, Rows) else None
    is_real = get_host_copy(mask).bool().numpy()
    # One label per row says nothing about tokens, and reading it would wait for the device.
    is_by_token = labels is not None and labels.shape == mask.shape
    # A graph of a rounded size serves many batches; one that stays padded has a size of its own.
    least = 0.0 if rounds_up else _LEAST_PADDING
    if not _is_removable(model, is_real, get_host_copy(labels) if is_by_token else None, least):
        return None
    rows = Rows.read(is_real, mask.device, rounds_up=rounds_up)
    if has_own_code:
        note_origin(rows, mask, is_real.copy())
    # Compiled blocks take a sliding window only, and rows with gaps have none.
    return None if rounds_up and not rows.is_contiguous else rows


def read_fixed_rows(
    model: Any, is_real: Mask, labels: Tensor | None, sizes_up: int = 0, least: Sizes = NO_SIZES
) -> FixedRows:
    """What ``find_rows`` must return for replays of this size; ``sizes_up`` picks a later one."""
    is_proven = find_filling(model).fills
    if is_on(model) and is_proven and _is_removable(model, is_real, labels):
        rows = Rows.read_filled(is_real, sizes_up, least)
        if rows.is_contiguous:
            return FixedRows(rows, labelled=_halve(model, rows, labels))
    return FixedRows(None, is_full=bool(is_real.all()))


def are_removable(model: Any, batch: Mapping[str, Any]) -> bool:
    """Whether both sides of a batch have padding that can be removed in a graph."""
    is_possible = find_filling(model).fills and is_on(model)
    return is_possible and read_masks(batch, _LEAST_PADDING) is not None


def _halve(model: Any, rows: Rows, labels: Tensor | None) -> int | None:
    """Half of the tokens, if no more have a label: with answers only, a head computes half as much.

    Any other fraction would be another graph.
    """
    half = len(rows.places) // 2
    if labels is None or labels.shape != rows.shape:
        return None
    return half if _count_labels(model, labels) <= half else None


def _count_labels(model: Any, labels: Tensor) -> int:
    trained = labels[:, 1:] if shifts_labels(model) else labels
    return int(np.count_nonzero(trained.numpy() != IGNORED_LABEL))


def count_labelled(model: Any, given: dict[str, Any]) -> int | None:
    """How many tokens of a batch have a label at most; None if labels are not by token."""
    mask, labels = given.get("attention_mask"), given.get("labels")
    if not isinstance(labels, Tensor) or getattr(mask, "shape", None) != labels.shape:
        return None
    fixed = get_fixed_rows(mask)
    if fixed is not None:
        return fixed.labelled
    return _count_labels(model, get_host_copy(labels))


def removes_padding(model: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the model removes padding from this batch."""
    find = find_sides if is_encoder_decoder(model) else find_rows
    return is_on(model) and find(model, dict(batch)) is not None


def is_on(model: Any) -> bool:
    """Whether a model's padding is removed now."""
    removal = find_fact(model, Removal)
    return removal is not None and removal.is_on


def _is_removable(
    model: Any, is_real: Mask, labels: Tensor | None, least: float = _LEAST_PADDING
) -> bool:
    """Whether there is enough padding, and removing it cannot change what is read."""
    padding = is_real.size - np.count_nonzero(is_real)
    if not padding or padding < least * is_real.size or padding == is_real.size:
        return False  # of padding alone, nothing would be left to compute on
    is_causal = shifts_labels(model)
    # Every label must be predicted from a real token.
    if labels is not None and labels.shape == is_real.shape:
        is_trained, is_read = (labels != -100).numpy(), is_real
        if is_causal:
            is_trained, is_read = is_trained[:, 1:], is_real[:, :-1]
        if (is_trained & ~is_read).any():
            return False
    # A classifier reads the first token. It must be real, as it was in ``proof.py``.
    return is_causal or bool(is_real[:, 0].all())


def find_sides(model: Any, given: dict[str, Any], *, rounds_up: bool = False) -> Sides | None:
    """As ``find_rows``, for both sides of a model."""
    if find_requested(model, given) or given.get("past_key_values") is not None:
        return None
    # No cache of unpadded tokens can be returned, and without it a tuple would be shorter.
    if given.get("use_cache") or given.get("return_dict") is False:
        return None
    fixed = get_fixed_rows(given.get("attention_mask"))
    if fixed is not None:
        sides = fixed.rows if isinstance(fixed.rows, Sides) else None
    else:
        removal = find_fact(model, Removal)
        if removal is not None and removal.only_in_graphs:
            return None
        sides = read_sides(given, _LEAST_PADDING, rounds_up=rounds_up)
    if sides is not None and not is_own_model(get_own_class(model)):
        mask = given["attention_mask"]
        is_real = None if fixed is not None else get_host_copy(mask).bool().numpy().copy()
        note_origin(sides.encoder, mask, is_real)
    return sides


def is_packed(given: dict[str, Any]) -> bool:
    """Whether only a batch's positions can tell its examples apart."""
    positions = given.get("position_ids")
    is_plain = isinstance(positions, Tensor) and positions.dim() == 2
    return is_plain and given.get("attention_mask") is None and given.get("use_cache") is False


def find_packed_rows(model: Any, given: dict[str, Any], *, rounds_up: bool = False) -> Rows | None:
    """The examples of packed rows; None if each row has just one, or something needs full rows."""
    labels, positions = find_labels(given), given["position_ids"]
    if not isinstance(labels, Tensor) or find_requested(model, given):
        return None
    if labels.shape != positions.shape or given.get("past_key_values") is not None:
        return None
    rows = Rows.read_packed(get_host_copy(positions), positions.device, rounds_up=rounds_up)
    return rows if len(rows.lengths) > len(positions) else None
