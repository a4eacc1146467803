"""A model's forward pass that decides, batch by batch, whether to run without padding."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rapidformer.accel.unpad.batches import find_packed_rows, find_rows, find_sides, is_packed
from rapidformer.accel.unpad.padding_observer import PaddingObserver
from rapidformer.accel.unpad.sides import is_encoder_decoder, use_sides
from rapidformer.accel.unpad.token_attention import use_rows
from rapidformer.models.watched import find_watched
from rapidformer.overlay import extend


def extend_model(
    model: nn.Module,
    inner_modules: Mapping[str, nn.Module],
    observer: PaddingObserver,
    *,
    rounds_up: bool,
    packs: bool,
) -> None:
    """Let a model run without padding on batches whose loss cannot change.

    ``inner_modules`` are the blocks and everything inside them: a user's hook there must see what
    it would see without the switch. With ``rounds_up``, the number of tokens is one of a few. With
    ``packs``, packed examples are computed apart as well.
    """
    if is_encoder_decoder(model):
        build = functools.partial(_build_two_sided, inner_modules, observer, rounds_up)
    else:
        build = functools.partial(_build_one_sided, inner_modules, observer, rounds_up, packs)
    extend(model, "unpad", build)


def _build_one_sided(
    inner_modules: Mapping[str, nn.Module],
    observer: PaddingObserver,
    rounds_up: bool,
    packs: bool,
    cls: Any,
) -> dict[str, Any]:
    """The forward pass of an encoder or a decoder."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        find = find_packed_rows if packs and is_packed(kwargs) else find_rows
        rows = None if find_watched(inner_modules) else find(self, kwargs, rounds_up=rounds_up)
        if rows is None:
            return cls.forward(self, *args, **kwargs)
        # With one label per row, the model returns nothing for padding that a loss could read.
        has_label_per_row = kwargs["labels"].shape != rows.shape
        if not has_label_per_row and not observer.ignores_padding:
            with observer.observe(rows):
                return cls.forward(self, *args, **kwargs)
        if find is find_packed_rows:
            kwargs = add_full_mask(kwargs)
        with use_rows(rows):
            return cls.forward(self, *args, **kwargs)

    # Trainers read the signature to choose a batch's columns.
    functools.update_wrapper(forward, cls.forward)
    return {"forward": forward}


def _build_two_sided(
    inner_modules: Mapping[str, nn.Module], observer: PaddingObserver, rounds_up: bool, cls: Any
) -> dict[str, Any]:
    """The forward pass of an encoder-decoder model."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_watched = bool(find_watched(inner_modules))
        sides = None if is_watched else find_sides(self, kwargs, rounds_up=rounds_up)
        if sides is None:
            return cls.forward(self, *args, **kwargs)
        if not observer.ignores_padding:
            with observer.observe(sides):
                return cls.forward(self, *args, **kwargs)
        kwargs["use_cache"] = False  # nothing could use a cache of packed tokens
        with use_sides(sides):
            return cls.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, cls.forward)
    return {"forward": forward}


def add_full_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Add a mask of ones: rows keep the examples apart, so the model need not do it."""
    return {**batch, "attention_mask": torch.ones_like(batch["position_ids"])}
