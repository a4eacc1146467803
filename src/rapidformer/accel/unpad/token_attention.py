"""Attention within each row of an unpadded batch, through Hugging Face's attention interface.

Two functions are registered under our own name. While a model runs unpadded, the mask function
returns a ``RowMask``, and the attention function attends row by row when it gets one. In every
other case both do what ``sdpa`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from rapidformer.accel.unpad import kernels
from rapidformer.accel.unpad.masks import RowMask, fuse
from rapidformer.accel.unpad.rows import Rows

_CURRENT: ContextVar[tuple[Rows, Rows | None] | None] = ContextVar("rows", default=None)


@contextmanager
def use_rows(rows: Rows, encoder: Rows | None = None) -> Iterator[None]:
    """Inside, masks are ``RowMask``s. With ``encoder``, full ones attend to the encoder's rows."""
    token = _CURRENT.set((rows, encoder))
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def without_rows() -> Iterator[None]:
    """Inside, masks are those of padded batches again."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@functools.cache
def register() -> str:
    """Add our functions to the interfaces; returns their name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    make_plain_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def make_mask(**given: Any) -> Any:
        rows, encoder = _CURRENT.get() or (None, None)
        may_attend = given["mask_function"]
        keys = encoder if may_attend is bidirectional_mask_function else None
        if rows is not None and _covers_batch(rows, keys or rows, given):
            return make_row_mask(rows, may_attend, keys)
        return make_plain_mask(**given)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, RowMask):
            return kernels.attend(query, key, value, attention_mask, **options), None
        # Looked up at each call: a later run may register a kernel for its model's bias.
        attend_plainly = ALL_ATTENTION_FUNCTIONS["sdpa"]
        found: tuple[Tensor, Tensor | None] = attend_plainly(
            module, query, key, value, attention_mask, **options
        )
        return found

    name = "rapidformer_by_row"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    return name


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
        rows,
        may_attend,
        is_causal=may_attend is causal_mask_function,
        is_full=may_attend is bidirectional_mask_function,
        keys=keys,
    )
    return fuse(mask) if rows.is_rounded else mask
