"""A model's forward pass that decides, batch by batch, whether to run without padding."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rapidformer.accel.unpad import tokenwise
from rapidformer.accel.unpad.batches import find_packed_rows, find_rows, find_sides, is_packed
from rapidformer.accel.unpad.calls import Call, Help, Removal
from rapidformer.accel.unpad.on_demand import release
from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.sides import SIDES, Sides, is_encoder_decoder
from rapidformer.accel.unpad.token_attention import inside, use_rows
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.models.watched import find_watched
from rapidformer.overlay import extend, get_own_class

assert tokenwise  # it fills the table of operations that need no padding


def extend_model(
    model: nn.Module,
    inner_modules: Mapping[str, nn.Module],
    removal: Removal,
    *,
    rounds_up: bool,
    packs: bool,
) -> None:
    """Let a model run without padding on batches whose loss cannot change.

    ``inner_modules`` are the blocks and everything inside them: a user's hook there must see what
    it would see without the switch. With ``rounds_up``, the number of tokens is one of a few. With
    ``packs``, packed examples are computed apart as well.
    """
    is_two_sided = is_encoder_decoder(model)
    find: Any = find_sides if is_two_sided else find_rows

    def build(cls: Any) -> dict[str, Any]:
        @functools.wraps(cls.forward)  # trainers read the signature to choose a batch's columns
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(cls.forward, self, *args, **kwargs)
            is_by_position = packs and is_packed(kwargs)
            if find_watched(inner_modules) or not (removal.is_on or is_by_position):
                return run()
            if is_by_position:
                rows = find_packed_rows(self, kwargs, rounds_up=rounds_up)
                return run() if rows is None else call_packed(run, rows, kwargs)
            shapes = [getattr(kwargs.get(n), "shape", n) for n in ("labels", "attention_mask")]
            is_labelled = is_two_sided or shapes[0] == shapes[1]
            if not _may_lack_padding(self, removal, has_label_per_token=is_labelled):
                return run()
            rows = find(self, kwargs, rounds_up=rounds_up)
            if rows is None:
                return run()
            if isinstance(rows, Sides):  # nothing could use a cache of packed tokens
                run = functools.partial(run, use_cache=False)
            return call_unpadded(self, run, rows, removal)

        return {"forward": forward}

    extend(model, "unpad", build)


def call_unpadded(model: nn.Module, run: Any, rows: Rows | Sides, removal: Removal) -> Any:
    """Run a model's forward pass without padding."""
    device = (rows.decoder if isinstance(rows, Sides) else rows).places.device
    call = Call(removal, run, device, knows_labels=_is_library_code(model))
    with inside(SIDES, rows) if isinstance(rows, Sides) else use_rows(rows):
        output = call.run(run)
    return release(output)


def _is_library_code(model: nn.Module) -> bool:
    """Whether a model and its loss are transformers' own."""
    loss = getattr(model, "loss_function", None)
    is_own_loss = str(getattr(loss, "__module__", "")).startswith("transformers.")
    return is_own_model(get_own_class(model)) and (loss is None or is_own_loss)


def _may_lack_padding(model: nn.Module, removal: Removal, *, has_label_per_token: bool) -> bool:
    """Whether nobody is going to read padding, or this rank can compute it then."""
    # Without gradients, results for each token are predictions, which someone reads as a whole.
    if has_label_per_token and not torch.is_grad_enabled():
        return False
    # transformers' models return nothing for padding if there is one label per row.
    is_closed = _is_library_code(model) and not has_label_per_token
    return removal.help_of_others is not Help.NEEDED or is_closed


def call_packed(run: Any, rows: Rows, batch: dict[str, Any]) -> Any:
    """Run a model's forward pass on packed examples, each by itself."""
    # Of ones: rows keep the examples apart, so the model need not do it.
    mask = torch.ones_like(batch["position_ids"])
    with use_rows(rows):
        return run(attention_mask=mask)
