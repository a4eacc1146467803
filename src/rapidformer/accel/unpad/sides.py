"""Encoder-decoder models without padding: the rows of both sides.

An encoder's real tokens are those of its mask. A decoder usually gets no mask: it is causal, so
tokens after a row's last label cannot affect the loss and count as padding. A mask does not show
which side it is for, since both may be equally long. So each stack announces itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.unpad.kernels import get_current, use_rows
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.accel.unpad.origin import Mask
from rapidformer.accel.unpad.rows import NO_SIZES, Rows, Sides, Sizes, round_width
from rapidformer.data.batch import get_host_copy
from rapidformer.overlay import extend

MASKS = ("attention_mask", "labels", "decoder_attention_mask")
"""The entries of a batch that show which of its tokens are real."""


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def read_sides(
    given: Mapping[str, Any], least_padding: float = 0.0, *, rounds_up: bool = False
) -> Sides | None:
    """The rows of a batch; None if something in it needs padding, or there is too little of it."""
    masks = read_masks(given, least_padding)
    if masks is None:
        return None
    device = given["labels"].device
    encoder, decoder = (Rows.read(mask, device, rounds_up=rounds_up) for mask in masks)
    return _pair(encoder, decoder) if rounds_up else _keep_contiguous(encoder, decoder)


def read_filled_sides(given: Mapping[str, Any], least: Sizes = NO_SIZES) -> Sides | None:
    """The same, keeping enough padding on both sides to reach one of a few sizes."""
    masks = read_masks(given)
    if masks is None:
        return None
    of_decoder = Sizes(tokens=least.label_tokens, bound=least.label_bound)
    longest = (int(mask.sum(1).max()) for mask in masks)
    # Powers of two also for few rows: with a position bias, attention is computed on all of them.
    first, second = map(max, map(round_width, longest), (least.bound, least.label_bound))
    encoder = Rows.read_filled(masks[0], 0, least, (first, second))
    decoder = Rows.read_filled(masks[1], 0, of_decoder, (second, first))
    return _pair(encoder, decoder)


def read_masks(given: Mapping[str, Any], least_padding: float = 0.0) -> tuple[Mask, Mask] | None:
    """Which tokens both sides compute on; None as for ``read_sides``."""
    mask, labels, decoder_mask = (given.get(name) for name in MASKS)
    if not isinstance(mask, Tensor) or not isinstance(labels, Tensor):
        return None
    if mask.dim() != 2 or labels.dim() != 2:
        return None
    is_real, is_label = _read_bools(mask), (get_host_copy(labels) != -100).numpy()
    is_needed = is_label[:, ::-1].cumsum(1)[:, ::-1] > 0
    is_needed[:, 0] = True  # no row may be empty
    if decoder_mask is not None:
        # An explicit mask decides, but must not hide a token that a label needs.
        is_decoded = _read_bools(decoder_mask)
        if is_decoded.shape != is_label.shape or (is_needed & ~is_decoded).any():
            return None
        is_needed = is_decoded
    real, padded = is_real.sum() + is_needed.sum(), is_real.size + is_needed.size
    if not is_real.any(1).all() or real > (1 - least_padding) * padded:
        return None
    return is_real, is_needed


def _pair(encoder: Rows, decoder: Rows) -> Sides | None:
    """Both sides with as many rows of keys as of queries, as fused kernels require."""
    encoder.extend_ends(decoder)
    decoder.extend_ends(encoder)
    return _keep_contiguous(encoder, decoder)


def _keep_contiguous(encoder: Rows, decoder: Rows) -> Sides | None:
    # A relative bias depends on distances in columns, which packing would change in rows with gaps.
    return Sides(encoder, decoder) if encoder.is_contiguous and decoder.is_contiguous else None


def _read_bools(mask: Tensor) -> Mask:
    return get_host_copy(mask).bool().numpy()


def find_stacks(model: Any) -> tuple[nn.Module, nn.Module] | None:
    """The encoder and the decoder; None if the model has only one, as some heads do."""
    stacks: list[Any] = [
        getattr(model, name, lambda: None)() for name in ("get_encoder", "get_decoder")
    ]
    are_modules = all(isinstance(each, nn.Module) and each is not model for each in stacks)
    return (stacks[0], stacks[1]) if are_modules and stacks[0] is not stacks[1] else None


def extend_sides(model: nn.Module, encoder: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """Let each stack use its own rows, and limit biases to the longest row; returns them all."""
    extend(encoder, "unpad", functools.partial(_build_stack, is_decoder=False))
    extend(decoder, "unpad", functools.partial(_build_stack, is_decoder=True))
    biased = find_biased(model)
    for module in biased:
        extend(module, "unpad", _build_biased, is_shared=True)
    return [encoder, decoder, *biased]


def _build_stack(cls: Any, *, is_decoder: bool) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sides = get_current()
        if not isinstance(sides, Sides):
            return cls.forward(self, *args, **kwargs)
        rows = (sides.decoder, sides.encoder) if is_decoder else (sides.encoder,)
        with use_rows(*rows):
            return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


def find_biased(model: nn.Module) -> list[Any]:
    """Attention layers that have, or could have, T5's relative position bias."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "has_relative_attention_bias")
        and callable(getattr(module, "compute_bias", None))
    ]


def _build_biased(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = next((v for v in (*args, *kwargs.values()) if isinstance(v, RowMask)), None)
        if mask is not None and kwargs.get("position_bias") is None:
            # By itself, the layer would build one for all pairs of tokens in the batch.
            kwargs["position_bias"] = _compute_bias(self, mask)
        return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


def _compute_bias(module: Any, mask: RowMask) -> Tensor:
    """The bias of the longest row, which all rows share; one zero if the layer has no bias."""
    device = mask.rows.places.device
    if not module.has_relative_attention_bias:
        return torch.zeros(1, 1, 1, 1, device=device)
    return module.compute_bias(*mask.bias_shape, device=device)
