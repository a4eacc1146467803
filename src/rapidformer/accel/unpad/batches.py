"""Which batches can run without padding: those whose loss cannot change.

The model must get its labels, and every label must belong to a real token; or its caller promises
to read no padding (``promises.py``). A model that a CUDA graph replays cannot read its mask. So its
rows are read from the batch in host memory first, and attached to the mask, which is overwritten in
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.origin import Mask
from rapidformer.accel.unpad.promises import find_labels, find_promise
from rapidformer.accel.unpad.rows import Rows, Sides
from rapidformer.accel.unpad.sides import is_encoder_decoder, read_sides
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.data.batch import IGNORED_LABEL, get_host_copy
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.towers import reads_more_than_text
from rapidformer.models.watched import find_requested
from rapidformer.overlay import find_fact, get_own_class

LEAST_PADDING = 0.05
"""Below this fraction of padding, removing it costs more than it saves."""
_FIXED = "rapidformer_fixed_rows"


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


def find_rows(
    model: Any, given: Mapping[str, Any], *, rounds_up: bool = False
) -> Rows | Sides | None:
    """The rows of a batch if removing its padding cannot change the loss, otherwise None."""
    mask, is_two_sided = given.get("attention_mask"), is_encoder_decoder(model)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not _is_plain(model, given):
        return None
    if is_two_sided and given.get("return_dict") is False:
        return None  # without the cache, which is left out, the tuple would be shorter
    fixed, removal = get_fixed_rows(mask), find_fact(model, Removal)
    rows: Rows | Sides | None = None
    if fixed is not None:
        rows = fixed.rows if isinstance(fixed.rows, Sides) == is_two_sided else None
    elif not is_two_sided:
        rows = _read_rows(model, mask, find_labels(given), rounds_up=rounds_up)
    elif removal is None or not removal.only_in_graphs:
        rows = read_sides(given, LEAST_PADDING, rounds_up=rounds_up)
    if rows is not None and not is_own_model(get_own_class(model)):
        is_real = get_host_copy(mask).bool().numpy().copy() if fixed is None else None
        rows.each[0].note_origin(mask, is_real)
    return rows


def _is_plain(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call says what is read of its result, and asks for nothing that needs padding."""
    promise, labels = find_promise(given), find_labels(given)
    is_known = isinstance(labels, Tensor) or (promise is not None and promise.reads_all_tokens)
    is_known = is_known and not _has_more_than_text(model, given)
    has_cache = bool(given.get("use_cache")) or given.get("past_key_values") is not None
    return is_known and not has_cache and not find_requested(model, given)


def _has_more_than_text(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call shows images: the trial had none, and Qwen3-VL adds them between blocks."""
    shapes = {v.shape for name, v in given.items() if isinstance(v, Tensor) and name != "labels"}
    return len(shapes) > 1 and reads_more_than_text(getattr(model, "config", None))


def _read_rows(model: Any, mask: Tensor, labels: Any, *, rounds_up: bool) -> Rows | None:
    is_real = get_host_copy(mask).bool().numpy()
    # One label per row says nothing about tokens, and reading it would wait for the device.
    is_by_token = labels is not None and labels.shape == mask.shape
    # A graph of a rounded size serves many batches; one that stays padded has a size of its own.
    least = 0.0 if rounds_up else LEAST_PADDING
    if not is_removable(model, is_real, get_host_copy(labels) if is_by_token else None, least):
        return None
    rows = Rows.read(is_real, mask.device, rounds_up=rounds_up)
    # Compiled blocks take a sliding window only, and rows with gaps have none.
    return None if rounds_up and not rows.is_contiguous else rows


def count_labels(model: Any, labels: Tensor) -> int:
    """How many of them the model's own loss compares."""
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
    return count_labels(model, get_host_copy(labels))


def is_on(model: Any) -> bool:
    """Whether a model's padding is removed now."""
    removal = find_fact(model, Removal)
    return removal is not None and removal.is_on


def is_removable(
    model: Any, is_real: Mask, labels: Tensor | None, least: float = LEAST_PADDING
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


def is_packed(given: Mapping[str, Any]) -> bool:
    """Whether only a batch's positions can tell its examples apart."""
    positions = given.get("position_ids")
    is_plain = isinstance(positions, Tensor) and positions.dim() == 2
    return is_plain and given.get("attention_mask") is None and given.get("use_cache") is False


def find_packed_rows(
    model: Any, given: Mapping[str, Any], *, rounds_up: bool = False
) -> Rows | None:
    """The examples of packed rows; None if each row has just one, or something needs full rows."""
    labels, positions = find_labels(given), given["position_ids"]
    is_by_token = isinstance(labels, Tensor) and labels.shape == positions.shape
    if not is_by_token or not _is_plain(model, given):
        return None
    rows = Rows.read_packed(get_host_copy(positions), positions.device, rounds_up=rounds_up)
    return rows if len(rows.lengths) > len(positions) else None
