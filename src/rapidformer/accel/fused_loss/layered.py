"""A head that is more than one product, such as a linear layer with LoRA: chunk by chunk, too.

Its module is called on a chunk of rows at a time, and again in the backward pass, so that the
logits of all tokens never exist. Only for losses that are computed right after the model's call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rapidformer.accel.fused_loss.chunked import (
    Losses,
    Recipe,
    choose_chunk,
    compute_losses,
    get_compute_type,
)
from rapidformer.accel.fused_loss.deferred import DTYPES, WATCHING
from rapidformer.accel.fused_loss.divergence import Teacher
from rapidformer.accel.fused_loss.followed import defer
from rapidformer.accel.fused_loss.head import Head
from rapidformer.accel.fused_loss.selection import select_labelled
from rapidformer.accel.split.known_loss import find_head
from rapidformer.models.watched import find_watched
from rapidformer.overlay import extend, remove

Apply = Callable[[Tensor], Tensor]


def find_layered_head(model: nn.Module) -> Any | None:
    """A linear head with adapters that treats each row alone, whole on this rank."""
    head: Any = find_head(model)
    base = getattr(head, "base_layer", None)
    if type(base) is not nn.Linear or find_watched({"head": head}):
        return None
    draws = any(isinstance(m, nn.Dropout) and m.training and m.p for m in head.modules())
    is_split = any(isinstance(parameter, DTensor) for parameter in head.parameters())
    return None if draws or is_split else head


@contextmanager
def deferring_layers(head: Any) -> Iterator[None]:
    """Inside, the head's outputs wait for their losses."""
    with WATCHING:
        extend(head, "loss", _build_members)
        try:
            yield
        finally:
            remove(head, "loss")


def _build_members(cls: Any) -> dict[str, Any]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        dtype, kind = get_compute_type(hidden), hidden.device.type
        if dtype not in DTYPES or torch.compiler.is_compiling():
            return cls.forward(self, hidden)
        is_cast = torch.is_autocast_enabled(kind)

        def apply(rows: Tensor) -> Tensor:
            # As it was at the call: autocast may have ended, and this layer been taken off.
            with torch.autocast(kind, dtype, enabled=is_cast):
                logits: Tensor = cls.forward(self, rows)
            return logits

        call = functools.partial(_call, apply, self.base_layer.out_features)
        return defer(Head(self, call, None, hidden), hidden, self.base_layer.out_features, dtype)

    return {"forward": forward}


def _call(
    apply: Apply, width: int, hidden: Tensor, labels: Tensor | None = None,
    recipe: Recipe | None = None, teacher: Teacher | None = None, is_wanted: bool = False,
) -> Tensor | Losses:  # fmt: skip
    """The logits, if they are wanted, or else the losses."""
    if labels is None or recipe is None:
        return apply(hidden)
    selection = select_labelled(hidden, labels, recipe.ignore_index, recipe.labelled)
    rows, targets = selection.rows, selection.labels
    teacher = None if teacher is None else teacher.map_rows(selection.take)
    recipe = replace(recipe, labelled=None)
    size = choose_chunk(len(rows), width, rows.device)
    parts = []
    for start in range(0, max(len(rows), 1), size):
        part = slice(start, start + size)
        other = None if teacher is None else teacher.map_rows(itemgetter(part))
        compute = functools.partial(_score, apply, targets[part], recipe, other)
        parts.append(checkpoint(compute, rows[part], use_reentrant=False, preserve_rng_state=False))
    values, statistics = zip(*parts, strict=True)
    has_statistics = recipe.num_statistics > 0
    if not recipe.is_by_row:
        return Losses(torch.stack(values).sum(0), sum(statistics) if has_statistics else None)
    losses = Losses(torch.cat(values), torch.cat(statistics, -1).T if has_statistics else None)
    losses = losses.map(selection.put_back)
    return losses if losses.statistics is None else losses._replace(statistics=losses.statistics.T)


def _score(
    apply: Apply, labels: Tensor, recipe: Recipe, teacher: Teacher | None, rows: Tensor
) -> Losses:
    return compute_losses(apply(rows), None, None, labels, recipe, teacher)
