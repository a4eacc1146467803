"""Attention over rows laid end to end, through Hugging Face's interface.

Two functions are registered under our own name. While a model runs unpadded, the mask function
returns a ``RowMask``, and attention attends row by row, by the first of ``_KERNELS`` that can. In
every other case both do what ``sdpa`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.unpad import cpu_attention, row_attention
from rapidformer.accel.unpad.masks import RowMask, fuse, get_largest_head
from rapidformer.accel.unpad.rows import Layout, Rows, Sides
from rapidformer.compat.torch_dispatch import attend_with_flash
from rapidformer.compat.transformers_masks import get_source
from rapidformer.compat.transformers_models import get_attention_table, get_mask_table
from rapidformer.errors import ModelError


@dataclass(frozen=True)
class Call:
    """One call of attention. Its tensors are [1, heads, tokens, size]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: RowMask
    dropout: float = 0.0
    scaling: float | None = None
    bias: Tensor | None = None
    """Added to the scores: [1, heads, longest row of queries, longest row of keys]."""
    plain: Callable[..., Any] | None = None
    """What computes attention of padded rows, through the same interface."""

    @property
    def is_on_cpu(self) -> bool:
        return self.query.device.type == "cpu"

    @property
    def is_compiled(self) -> bool:
        return self.mask.fused is not None

    @property
    def takes_flash(self) -> bool:
        """Whether flash attention can compute it."""
        fused = self.mask.fused
        largest = get_largest_head(self.query.device) if fused is None else fused.largest_head
        is_plain = self.bias is None and (fused is not None or self.mask.window is not None)
        return is_plain and takes_flash(self.query, self.value, largest)

    @property
    def takes_short_rows(self) -> bool:
        """Whether the kernel for short rows can compute it, which flash attention could as well."""
        size = self.query.shape[-1]
        is_known = size in row_attention.HEADS_ON_GPU and size == self.value.shape[-1]
        return is_known and self.takes_flash and self.mask.parts.are_short

    def flatten(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [tokens, heads, size]."""
        # Not tensor[0]: its gradient is a copy, that of a squeezed tensor a view.
        q, k, v = (part.squeeze(0).transpose(0, 1) for part in (self.query, self.key, self.value))
        return q, k, v

    def pad(self, queries: Layout, keys: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The same in layouts of padded rows: [rows, heads, columns, size]."""
        layouts = zip((queries, keys, keys), self.flatten(), strict=True)
        q, k, v = (layout.pad(tokens[None]).transpose(1, 2) for layout, tokens in layouts)
        return q, k, v


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, dropout: float = 0.0,
    scaling: float | None = None, position_bias: Tensor | None = None,
    plain: Callable[..., Any] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """[1, heads, tokens, size] -> [1, tokens, heads, size].

    As ``sdpa``, it ignores other options, such as the soft cap of Gemma 2.
    """
    query, key, value = (_cast(tensor) for tensor in (query, key, value))
    if position_bias is not None and position_bias.shape[-1] == 1:
        position_bias = None  # the same for all keys, so a softmax ignores it
    call = Call(query, key, value, mask, dropout, scaling, position_bias, plain)
    for can_compute, compute in _KERNELS:
        if can_compute(call):
            return compute(call)
    raise AssertionError("the last kernel computes any call")


def takes_flash(query: Tensor, value: Tensor, largest_head: int) -> bool:
    """Whether flash attention takes this dtype and head size; values may be padded to it."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    size = query.shape[-1]
    return value.shape[-1] <= size and size % 8 == 0 and size <= largest_head


def _cast(tensor: Tensor) -> Tensor:
    """Cast as autocast does for torch's own attention: it does not know these operators."""
    if tensor.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cuda"))


def _attend_with_operator(call: Call) -> Tensor:
    """One operator for all lengths: a graph of single rows would differ from batch to batch."""
    parts = call.mask.parts
    assert parts.window is not None
    return row_attention.attend_by_row(
        *call.flatten(), (parts.ends, parts.key_ends), max(parts.longest, parts.longest_key),
        call.bias,
        dropout=call.dropout, window=parts.window, scale=call.scaling,
    )[None]  # fmt: skip


def _attend_with_flash(call: Call) -> Tensor:
    """Flash attention, which takes rows of different lengths."""
    parts, (query, key, value) = call.mask.parts, call.flatten()
    size, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing:  # zeros in values come back as zeros
        value = functional.pad(value, (0, missing))
    assert parts.window is not None
    output = attend_with_flash(
        query, key, value, (parts.ends, parts.key_ends), (parts.longest, parts.longest_key),
        dropout=call.dropout, window=parts.window, scale=call.scaling,
    )[None]  # fmt: skip
    return output[..., :size] if missing else output


def _attend_row_by_row(call: Call) -> Tensor:
    """Attend within each row on its own, without any padding."""
    mask = call.mask
    lengths = mask.rows.lengths, mask.key_rows.lengths
    if (mask.is_causal or mask.is_full) and cpu_attention.suits(call.query, call.dropout):
        query, key, value = (each.squeeze(0) for each in (call.query, call.key, call.value))
        return cpu_attention.attend(
            query, key, value, lengths, call.dropout, call.scaling, is_causal=mask.is_causal
        )[None]
    queries: Any = call.query.split(lengths[0], 2)
    keys: Any = call.key.split(lengths[1], 2)
    values: Any = call.value.split(lengths[1], 2)
    attended = [
        _attend_with_torch(q, k, v, call, mask.get_mask(row), is_causal=mask.is_causal)
        for row, (q, k, v) in enumerate(zip(queries, keys, values, strict=True))
        if q.shape[2]
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _attend_with_torch(
    q: Tensor, k: Tensor, v: Tensor, call: Call, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=call.dropout, scale=call.scaling,
        is_causal=is_causal, enable_gqa=k.shape[1] != q.shape[1],
    )  # fmt: skip


def attend_in_grid(call: Call) -> Tensor:
    """Pad the rows for torch's own attention, which takes any mask, bias, dtype and device."""
    mask = call.mask
    queries, keys = map(Layout.of_lengths, (mask.rows, mask.key_rows))
    q, k, v = call.pad(queries, keys)
    # Padding follows the tokens here, so no token of a causal model sees it.
    is_causal = mask.is_causal and call.bias is None
    allowed = None if is_causal else mask.grid
    if call.bias is not None:
        allowed = call.bias.to(q.dtype).masked_fill(~mask.grid, float("-inf"))
    if call.plain is None:
        attended = _attend_with_torch(q, k, v, call, allowed, is_causal=is_causal).transpose(1, 2)
    else:  # this one avoids cuDNN, which would prepare a plan for each size
        attended, _ = call.plain(
            q, k, v, allowed, dropout=call.dropout, scaling=call.scaling, is_causal=is_causal
        )
    return queries.take(attended.flatten(0, 1))


def _attend_in_batch(call: Call) -> Tensor:
    """Put tokens back at their places in the batch, for attention that takes any bias and dtype."""
    queries, keys = call.mask.layouts
    assert call.plain is not None
    output, _ = call.plain(
        *call.pad(queries, keys), call.mask.in_batch,
        dropout=call.dropout, scaling=call.scaling, position_bias=call.bias,
    )  # fmt: skip
    return queries.take(output.flatten(0, 1))


def _refuse_fixed(call: Call) -> Tensor:
    # The other kernels read lengths on the host, and a replay would repeat those of one batch.
    raise ModelError("only flash attention takes lengths that change, and it needs 16 bits")


_attend_in_grid_uncompiled: Callable[[Call], Tensor] = torch.compiler.disable(attend_in_grid)
_attend_in_batch_uncompiled: Callable[[Call], Tensor] = torch.compiler.disable(_attend_in_batch)

_KERNELS: tuple[tuple[Callable[[Call], bool], Callable[[Call], Tensor]], ...] = (
    (lambda call: call.is_compiled and call.is_on_cpu, _attend_with_operator),
    # 16 bits on a GPU; a full, causal or sliding mask, without a bias.
    (lambda call: not call.is_on_cpu and call.takes_short_rows, _attend_with_operator),
    (lambda call: not call.is_on_cpu and call.takes_flash, _attend_with_flash),
    (lambda call: call.mask.rows.is_filled and call.plain is not None, _attend_in_batch_uncompiled),
    (lambda call: call.mask.rows.is_fixed, _refuse_fixed),
    (lambda call: call.is_compiled, _attend_in_grid_uncompiled),
    (lambda call: call.is_on_cpu and call.bias is None, _attend_row_by_row),
    (lambda call: True, attend_in_grid),
)


NAME = "rapidformer_by_row"
T = TypeVar("T")
_Current = tuple[Rows | Sides | None, Rows | None]
_CURRENT: ContextVar[_Current] = ContextVar("rows", default=(None, None))
"""Rows, and those that full masks attend to if they are others; between stacks, both sides."""


@contextmanager
def inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, a variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def use_rows(
    rows: Rows | Sides | None, encoder: Rows | None = None
) -> AbstractContextManager[None]:
    """Inside, masks are ``RowMask``s (without rows: as usual); full ones attend to ``encoder``."""
    return inside(_CURRENT, (rows, encoder))


def get_current() -> Rows | Sides | None:
    """What a model runs on now; None: on a padded batch."""
    return _CURRENT.get()[0]


def get_current_rows() -> Rows | None:
    """The rows that a model, or one stack of it, runs on now."""
    rows = get_current()
    return rows if isinstance(rows, Rows) else None


@functools.cache
def register() -> None:
    """Give transformers' interfaces our functions, for good: a copy of a model may outlive us."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _build_attention())
    AttentionMaskInterface.register(NAME, _build_masks())


def _build_masks() -> Any:
    from transformers.masking_utils import bidirectional_mask_function

    def make_mask(**given: Any) -> Any:
        rows, encoder = get_current_rows(), _CURRENT.get()[1]
        may_attend = given["mask_function"]
        keys = encoder if may_attend is bidirectional_mask_function else None
        if rows is not None and _covers_batch(rows, keys or rows, given):
            # Of a decoder's own mask, nothing is known but that it hides no token with a label.
            origin = None if encoder is not None and keys is None else (keys or rows).origin
            if origin is not None and not origin.allows(get_source(given["attention_mask"])):
                return get_mask_table()["sdpa"](**given)
            return make_row_mask(rows, may_attend, keys)
        return get_mask_table()["sdpa"](**given)

    return make_mask


def _build_attention() -> Any:
    # Looked up at each call: inside a call of ours, it may be another one.
    table = get_attention_table()

    def attend_as_masked(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> Any:
        plain = functools.partial(table["sdpa"], module)
        if isinstance(attention_mask, RowMask):
            return attend(query, key, value, attention_mask, plain=plain, **options), None
        return plain(query, key, value, attention_mask, **options)

    return attend_as_masked


def _covers_batch(rows: Rows, keys: Rows, given: dict[str, Any]) -> bool:
    """Whether a mask is for the batch itself: no cache, no other tokens, no custom function."""
    size = (given["batch_size"], given["q_length"])
    offsets = (given.get("q_offset", 0), given.get("kv_offset", 0))
    is_whole = size == rows.shape and given["kv_length"] == keys.shape[1]
    return is_whole and offsets == (0, 0) and not given.get("use_vmap", False)


def make_current_mask(mask: Tensor) -> RowMask | None:
    """The mask of the rows that a model runs on now, if this one is of the batch; else None."""
    from transformers.masking_utils import bidirectional_mask_function

    rows = get_current_rows()
    if rows is None or tuple(mask.shape) != rows.shape:
        return None
    return make_row_mask(rows, bidirectional_mask_function)


def make_row_mask(rows: Rows, may_attend: Any, keys: Rows | None = None) -> RowMask:
    """The mask of these rows; ``keys`` are the rows attended to, if they are others."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    mask = RowMask(
        rows, may_attend, is_causal=may_attend is causal_mask_function,
        is_full=may_attend is bidirectional_mask_function, keys=keys,
    )  # fmt: skip
    return fuse(mask) if rows.is_rounded else mask
