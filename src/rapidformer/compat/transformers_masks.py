"""transformers' attention masks, made without waiting for the device.

transformers leaves out a mask that hides nothing. To find out, it reads the mask from the device,
and the host waits for all work before it. Here the answer comes from the host if it has one. Masks
for eager attention wait because two numbers are copied to the device; here they are filled in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PRIVATE_NAMES = {
    "transformers.masking_utils._preprocess_mask_arguments": "masks without host waits",
    "transformers.masking_utils._ignore_causal_mask_sdpa": "masks without host waits",
    "transformers.masking_utils._ignore_bidirectional_mask_sdpa": "masks without host waits",
}

_CHECK = "warn_if_padding_and_no_attention_mask"
_TAKES = {
    "_preprocess_mask_arguments": [
        "config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids",
        "layer_idx", "encoder_hidden_states",
    ],
    "_ignore_causal_mask_sdpa": [
        "padding_mask", "q_length", "kv_length", "q_offset", "kv_offset", "local_attention_size",
    ],
    "_ignore_bidirectional_mask_sdpa": ["padding_mask", "kv_length", "local_attention_size"],
    "find_packed_sequence_indices": ["position_ids"],
    _CHECK: ["self", "input_ids", "attention_mask"],
}  # fmt: skip
"""The parameters of what is replaced."""
_IS_FULL = "rapidformer_is_full"
_OWN_MASKS = (
    "attention_mask = torch.ones(batch_size, mask_seq_length, device=inputs_embeds.device)",
    "attention_mask = torch.ones(inputs_embeds.shape[0], seq_length, device=inputs_embeds.device)",
)
"""How the decoders of BART and its relatives, and that of OPT, make a mask."""

Ask = Callable[[Tensor], bool | None]
"""A question about a tensor; None if only the device knows the answer."""


def ask_host_first(
    is_full: Ask, is_packed: Ask, find_values: Callable[[Tensor], Any | None]
) -> None:
    """Let these answer whether a mask has no padding, whether positions start again within a row,
    and what a tensor's values are. Call it once: it applies to the whole process.
    """
    from transformers import PreTrainedModel, masking_utils

    for owner, name, build in (
        (masking_utils, "_preprocess_mask_arguments", functools.partial(_keep_answer, is_full)),
        (masking_utils, "_ignore_causal_mask_sdpa", functools.partial(_ignore_causal, is_full)),
        (masking_utils, "_ignore_bidirectional_mask_sdpa", functools.partial(_ignore_all, is_full)),
        (masking_utils, "find_packed_sequence_indices", functools.partial(_find_packed, is_packed)),
        (PreTrainedModel, _CHECK, functools.partial(_look_for_padding, find_values)),
    ):
        original = getattr(owner, name, None)
        # If another version of transformers takes other parameters, its own function stays.
        if original is not None and list(inspect.signature(original).parameters) == _TAKES[name]:
            setattr(owner, name, functools.wraps(original)(build(original)))
    interface = masking_utils.AttentionMaskInterface
    interface.register("eager", _fill_eager(masking_utils.eager_mask, masking_utils.sdpa_mask))


def makes_own_mask(module: nn.Module) -> bool:
    """Whether a model's ``forward`` makes a mask of ones if it gets none, as BART's decoder does.

    Only its source says so. If that changes, the mask is read from the device as before.
    """
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):  # not in a file
        return False
    return any(line in source for line in _OWN_MASKS)


def _keep_answer(is_full: Ask, original: Any) -> Any:
    def preprocess(
        config: Any, inputs_embeds: Any, attention_mask: Any, *rest: Any, **more: Any
    ) -> Any:
        found = original(config, inputs_embeds, attention_mask, *rest, **more)
        mask = found[1]
        # The boolean copy is a new tensor, which the host knows nothing about.
        is_copy = isinstance(mask, Tensor) and mask is not attention_mask
        if is_copy and not _is_tracing():
            setattr(mask, _IS_FULL, is_full(attention_mask))
        return found

    return preprocess


def _is_tracing() -> bool:
    """Whether a call is being traced, so that what is decided must hold for other batches too."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def _ask(is_full: Ask, mask: Tensor | None) -> bool | None:
    if _is_tracing():
        return None
    if mask is None:
        return True  # transformers itself says no while a CUDA graph is recorded
    if not isinstance(mask, Tensor):
        return None
    answer: bool | None = getattr(mask, _IS_FULL, None)
    return is_full(mask) if answer is None else answer


def _ignore_causal(is_full: Ask, original: Any) -> Any:
    def ignore(
        padding_mask: Tensor | None,
        q_length: int,
        kv_length: int,
        q_offset: Any,
        kv_offset: int,
        local_attention_size: int | None = None,
    ) -> bool:
        answer = _ask(is_full, padding_mask)
        if answer is None or q_length != kv_length:
            found: bool = original(
                padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size
            )
            return found
        return answer and not _is_local(kv_length, local_attention_size)

    return ignore


def _ignore_all(is_full: Ask, original: Any) -> Any:
    def ignore(
        padding_mask: Tensor | None, kv_length: int, local_attention_size: int | None = None
    ) -> bool:
        answer = _ask(is_full, padding_mask)
        if answer is None:
            found: bool = original(padding_mask, kv_length, local_attention_size)
            return found
        return answer and not _is_local(kv_length, local_attention_size)

    return ignore


def _is_local(length: int, size: int | None) -> bool:
    """Whether a window of this size hides any of the tokens."""
    return size is not None and length >= size


def _find_packed(is_packed: Ask, original: Any) -> Any:
    def find(position_ids: Tensor) -> Tensor | None:
        answer = None if _is_tracing() else is_packed(position_ids)
        if answer is None:
            found: Tensor | None = original(position_ids)
            return found
        if not answer:
            return None
        starts = position_ids[:, 1:] - position_ids[:, :-1] != 1
        return torch.nn.functional.pad(starts.cumsum(-1), (1, 0))

    return find


def _fill_eager(original: Any, build_bools: Any) -> Any:
    """As transformers' own, which copies its two numbers to the device, and waits for it."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Tensor | None:
        if args:  # by position, sdpa's parameters are others
            found: Tensor | None = original(*args, **kwargs)
            return found
        dtype = kwargs.pop("dtype", torch.float32)
        is_seen = build_bools(**{**kwargs, "allow_is_causal_skip": False})
        if is_seen is None:
            return None
        zeros = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
        return zeros.masked_fill(~is_seen, torch.finfo(dtype).min)

    return build


def _look_for_padding(find_values: Callable[[Tensor], Any | None], original: Any) -> Any:
    def check(self: Any, input_ids: Tensor, attention_mask: Any) -> None:
        is_asked = attention_mask is None and not _is_tracing()
        values = find_values(input_ids) if is_asked else None
        original(self, input_ids if values is None else values, attention_mask)

    return check
