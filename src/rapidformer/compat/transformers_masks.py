"""transformers' attention masks, made without waiting for the device.

transformers leaves out a mask that hides nothing. To find out, it reads the mask from the device,
and the host waits for all work before it. Here the answer comes from the host if it has one. Masks
for eager attention wait because two numbers are copied to the device; here they are filled in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.compat.patches import KNOWN, Entry, Patch, describe_difference
from rapidformer.compat.transformers_models import get_mask_table

PRIVATE_NAMES = {
    "transformers.masking_utils._preprocess_mask_arguments": "masks without host waits",
    "transformers.masking_utils._ignore_causal_mask_sdpa": "masks without host waits",
    "transformers.masking_utils._ignore_bidirectional_mask_sdpa": "masks without host waits",
}

CHECK = "warn_if_padding_and_no_attention_mask"
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
    "is_tracing": ["tensor"],
    "eager_mask": [
        "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function",
        "attention_mask", "dtype", "allow_is_bidirectional_skip", "use_vmap", "device", "kwargs",
    ],
    CHECK: ["self", "input_ids", "attention_mask"],
}  # fmt: skip
"""The parameters of what is replaced."""
_IS_FULL = "rapidformer_is_full"
_SOURCE = "rapidformer_source"
_OWN_MASKS = (
    "attention_mask = torch.ones(batch_size, mask_seq_length, device=inputs_embeds.device)",
    "attention_mask = torch.ones(inputs_embeds.shape[0], seq_length, device=inputs_embeds.device)",
    "position_ids = position_ids.unsqueeze(0).repeat(inputs_embeds.shape[0], 1)",
)
"""How the decoders of BART and its relatives, and that of OPT, make a mask; and how Whisper's makes
positions, which transformers would look at if there is no mask.
"""
_MASK_MAKERS = {
    "BartDecoder", "BigBirdPegasusDecoder", "BioGptModel", "BlenderbotDecoder",
    "BlenderbotSmallDecoder", "LongT5Stack", "M2M100Decoder", "MarianDecoder", "MBartDecoder",
    "OPTDecoder", "PegasusDecoder", "PegasusXDecoder", "Pix2StructTextModel", "PLBartDecoder",
    "Pop2PianoStack", "PPFormulaNetTextModel", "SwitchTransformersStack", "UdopStack",
    "WhisperDecoder",
}  # fmt: skip
"""The classes that do so in the versions we know."""

Ask = Callable[[Tensor], bool | None]
"""A question about a tensor; None if only the device knows the answer."""
IsHere = Callable[[], bool]
"""Whether one of our calls runs in this thread, and is not being traced."""


def patch_masks(is_full: Ask, is_packed: Ask) -> Patch:
    """Inside, these answer whether a mask has no padding, and whether positions start again within
    a row. While a call is traced, transformers' own functions answer.
    """

    def is_here() -> bool:
        return not is_call_traced() and patch.is_inside()

    def list_entries() -> Iterator[Entry]:
        from transformers import masking_utils

        for name, build in (
            ("_preprocess_mask_arguments", _keep_answer),
            ("_ignore_causal_mask_sdpa", _ignore),
            ("_ignore_bidirectional_mask_sdpa", _ignore),
        ):
            yield Entry(masking_utils, name, functools.partial(build, is_here, is_full))
        find = functools.partial(_find_packed, is_here, is_packed)
        yield Entry(masking_utils, "find_packed_sequence_indices", find)
        keep = functools.partial(_keep_token_mask, is_here, is_full)
        yield Entry(masking_utils, "is_tracing", keep)
        # If the user has registered another one, that one stays.
        if masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"] is not masking_utils.eager_mask:
            return
        fill = functools.partial(_fill_eager, is_here, masking_utils.sdpa_mask)
        yield Entry(get_mask_table(), "eager", fill)

    patch = Patch(list_entries)
    return patch


def find_unknown_masks() -> str | None:
    """Why the masks of the installed transformers cannot be made here; None if they can."""
    from transformers import PreTrainedModel, masking_utils

    for name, known in _TAKES.items():
        owner = PreTrainedModel if name == CHECK else masking_utils
        difference = describe_difference("transformers", owner, name, known)
        if difference is not None:
            return difference
    return None


def makes_own_mask(module: nn.Module) -> bool:
    """Whether a model's own ``forward``, by its source, hides nothing unless it gets a mask."""
    from transformers import PreTrainedModel

    is_known = isinstance(module, PreTrainedModel)
    return is_known and _has_line(inspect.unwrap(type(module).forward), _OWN_MASKS)


@functools.lru_cache(maxsize=1000)  # every model's modules are asked about
def _has_line(forward: Any, lines: tuple[str, ...]) -> bool:
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):  # not in a file
        return False
    return any(line in source for line in lines)


def find_unknown_mask(module: nn.Module) -> str | None:
    """Why a class that used to make its own mask has to be read; None for all others."""
    name, home = type(module).__name__, type(module).__module__
    is_known = name in _MASK_MAKERS and home.startswith("transformers.models.")
    if not is_known or makes_own_mask(module):
        return None
    return (
        f"{name} of transformers {version('transformers')} makes its mask in another way than "
        f"that of {KNOWN['transformers']}"
    )


def _keep_answer(is_here: IsHere, is_full: Ask, original: Any) -> Any:
    @functools.wraps(original)
    def preprocess(
        config: Any, inputs_embeds: Any, attention_mask: Any, *rest: Any, **more: Any
    ) -> Any:
        arguments = original(config, inputs_embeds, attention_mask, *rest, **more)
        mask = arguments[1]
        # The boolean copy is a new tensor, which the host knows nothing about.
        is_copy = isinstance(mask, Tensor) and mask is not attention_mask
        if is_copy and is_here():
            setattr(mask, _IS_FULL, is_full(attention_mask))
            setattr(mask, _SOURCE, attention_mask)
        return arguments

    return preprocess


def get_source(mask: Any) -> Any:
    """The mask that a model was given, of which this one may be transformers' copy in booleans."""
    return getattr(mask, _SOURCE, mask)


def is_call_traced() -> bool:
    """Whether a call is being traced, so that what is decided must hold for other batches too."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def _ask(is_full: Ask, mask: Tensor | None) -> bool | None:
    if mask is None:
        return True  # transformers itself says no while a CUDA graph is recorded
    if not isinstance(mask, Tensor):
        return None
    answer: bool | None = getattr(mask, _IS_FULL, None)
    return is_full(mask) if answer is None else answer


def _ignore(is_here: IsHere, is_full: Ask, original: Any) -> Any:
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def ignore(*args: Any, **kwargs: Any) -> bool:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        length, window = given["kv_length"], given.get("local_attention_size")
        is_square = given.get("q_length", length) == length
        answer = _ask(is_full, given["padding_mask"]) if is_here() and is_square else None
        if answer is None:
            return original(*args, **kwargs)
        return answer and (window is None or length < window)

    return ignore


def _keep_token_mask(is_here: IsHere, is_full: Ask, original: Any) -> Any:
    """Layers that mix tokens by recurrences or convolutions multiply by the mask of tokens.

    If it is full, transformers leaves it out, but not while tracing. To find out takes longer.
    """

    @functools.wraps(original)
    def is_tracing(tensor: Any = None) -> bool:
        # The masks of attention have become boolean by then.
        is_mask = isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.dtype != torch.bool
        return (is_mask and is_here() and is_full(tensor) is not None) or original(tensor)

    return is_tracing


def _find_packed(is_here: IsHere, is_packed: Ask, original: Any) -> Any:
    @functools.wraps(original)
    def find(position_ids: Tensor) -> Tensor | None:
        answer = is_packed(position_ids) if is_here() else None
        if answer is None:
            return original(position_ids)
        if not answer:
            return None
        starts = position_ids[:, 1:] - position_ids[:, :-1] != 1
        return torch.nn.functional.pad(starts.cumsum(-1), (1, 0))

    return find


def _fill_eager(is_here: IsHere, build_bools: Any, original: Any) -> Any:
    """As transformers' own, which copies its two numbers to the device, and waits for it."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Tensor | None:
        if args or not is_here():  # by position, sdpa's parameters are others
            return original(*args, **kwargs)
        dtype = kwargs.pop("dtype", torch.float32)
        is_seen = build_bools(**{**kwargs, "allow_is_causal_skip": False})
        if is_seen is None:
            return None
        zeros = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
        return zeros.masked_fill(~is_seen, torch.finfo(dtype).min)

    return build
