"""Attention within each row of an unpadded batch, through Hugging Face's attention interface.

Two functions are registered under our own name. While a model runs unpadded, the mask function
returns a ``RowMask``, and the attention function attends row by row when it gets one. In every
other case both do what ``sdpa`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn

from rapidformer.accel.unpad import kernels
from rapidformer.accel.unpad.masks import RowMask, fuse
from rapidformer.accel.unpad.rows import Rows
from rapidformer.compat.transformers_models import get_attention_table, get_mask_table

NAME = "rapidformer_by_row"
T = TypeVar("T")
_CURRENT: ContextVar[tuple[Rows | None, Rows | None]] = ContextVar("rows", default=(None, None))


@contextmanager
def inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, a variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use_rows(rows: Rows | None, encoder: Rows | None = None) -> AbstractContextManager[None]:
    """Inside, masks are ``RowMask``s (without rows: as usual); full ones attend to ``encoder``."""
    return inside(_CURRENT, (rows, encoder))


@functools.cache
def register() -> None:
    """Give transformers' interfaces our functions, for good: a copy of a model may outlive us."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _build_attention())
    AttentionMaskInterface.register(NAME, _build_masks())


def _build_masks() -> Any:
    from transformers.masking_utils import bidirectional_mask_function

    def make_mask(**given: Any) -> Any:
        rows, encoder = _CURRENT.get()
        may_attend = given["mask_function"]
        keys = encoder if may_attend is bidirectional_mask_function else None
        if rows is not None and _covers_batch(rows, keys or rows, given):
            return make_row_mask(rows, may_attend, keys)
        return get_mask_table()["sdpa"](**given)

    return make_mask


def _build_attention() -> Any:
    # Looked up at each call: inside a call of ours, it may be another one.
    table = get_attention_table()

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> Any:
        if isinstance(attention_mask, RowMask):
            return kernels.attend(query, key, value, attention_mask, **options), None
        return table["sdpa"](module, query, key, value, attention_mask, **options)

    return attend


def _covers_batch(rows: Rows, keys: Rows, given: dict[str, Any]) -> bool:
    """Whether a mask is for the batch itself: no cache, no other tokens, no custom function."""
    size = (given["batch_size"], given["q_length"])
    offsets = (given.get("q_offset", 0), given.get("kv_offset", 0))
    is_whole = size == rows.shape and given["kv_length"] == keys.shape[1]
    return is_whole and offsets == (0, 0) and not given.get("use_vmap", False)


def make_row_mask(rows: Rows, may_attend: Any, keys: Rows | None = None) -> RowMask:
    """The mask of these rows; ``keys`` are the rows attended to, if they are others."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    mask = RowMask(
        rows, may_attend, is_causal=may_attend is causal_mask_function,
        is_full=may_attend is bidirectional_mask_function, keys=keys,
    )  # fmt: skip
    return fuse(mask) if rows.is_rounded else mask
