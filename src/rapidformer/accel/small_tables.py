"""Embedding tables of a few rows, whose gradient is a matrix product.

torch adds up the gradients of all tokens that share a row of the table one by one. For T5's 32
buckets and 512 x 512 pairs of tokens, that was 12 of the 286 ms of a T5-3B step on an H200; for
BERT's two token types it was 0.1 of 4.8 ms, in a step of 16 short rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.assembly import Assembly
from rapidformer.overlay import extend

_FEW = 4
"""Rows of the largest table that this is used for, apart from T5's: others have not been timed."""


def apply(assembly: Assembly) -> str | None:
    """Change every small table."""
    count = apply_small_tables(assembly.model)
    return f"{count} of at most {_FEW} rows" if count else None


def apply_small_tables(model: nn.Module) -> int:
    """Take the gradient of every table of a few rows from a matrix product; returns how many."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    small = [table for table in tables if table.num_embeddings <= _FEW]
    for table in small:
        extend_table(table)
    return len(small)


def extend_table(table: nn.Module) -> None:
    """Do so for one table, unless it is split over ranks or does more than look up."""
    if type(table) is nn.Embedding and table.max_norm is None and not table.sparse:
        extend(table, "table", _build_table, is_shared=True)


def _build_table(cls: Any) -> dict[str, Any]:
    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        if self.padding_idx is not None or self.scale_grad_by_freq:
            return cls.forward(self, ids)
        return _Lookup.apply(ids, self.weight)

    return {"forward": forward}


class _Lookup(torch.autograd.Function):
    """An embedding whose gradient is a product with one-hot rows."""

    generate_vmap_rule = True  # with setup_context, this lets torch.func differentiate a model

    @staticmethod
    def forward(ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ids, table = inputs
        ctx.save_for_backward(ids)
        ctx.rows = len(table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        rows = torch.arange(ctx.rows, device=ids.device)
        is_used = (rows[:, None] == ids.flatten()).to(gradient.dtype)
        with torch.autocast(gradient.device.type, enabled=False):
            return None, is_used @ gradient.reshape(-1, gradient.shape[-1])
