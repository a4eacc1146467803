"""Answer transformers' questions about a batch from host memory, without waiting for the device.

To build an attention mask, transformers asks whether a batch has padding, and whether its positions
restart. The batch's copy in host memory has the answers. Positions that transformers' own code
creates count up if the model was given nothing but tokens, and if all rows share them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.context.exchanged_attention import find_configs
from rapidformer.accel.unpad.batches import FixedRows, fix_rows, get_fixed_rows
from rapidformer.compat.torch_dispatch import is_transformed
from rapidformer.compat.torch_tensors import get_base, has_storage, locate
from rapidformer.compat.transformers_masks import (
    CHECK,
    find_unknown_mask,
    find_unknown_masks,
    is_call_traced,
    makes_own_mask,
    patch_masks,
)
from rapidformer.compat.transformers_models import is_model
from rapidformer.data.batch import find_host_copy, fits_numpy
from rapidformer.models.plan import find_outermost
from rapidformer.overlay import extend, list_layers

_TOKENS = {"input_ids", "inputs_embeds", "labels"}


@dataclass(frozen=True)
class _Call:
    """The arguments of the model that is running."""

    tensors: dict[Hashable, Tensor]
    """By address: a model may pass on a view of a tensor instead of the tensor itself."""
    has_tokens_only: bool


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


def apply(assembly: Assembly) -> str | None:
    """Let transformers build this model's masks from what the host knows."""
    problem = find_unknown_masks()
    if problem is None:
        return make_masks_from_host(assembly.model)
    assembly.applied.leave_off(f"{problem}; steps wait for the device")
    return None


def make_masks_from_host(model: nn.Module) -> str | None:
    """The same; returns what is done."""
    if not find_configs(model) or any("masks" in list_layers(m) for m in model.modules()):
        return None  # a copy of a composed model has the overlays already
    problem: str | None = None
    for module in model.modules():
        if makes_own_mask(module):
            extend(module, "masks", _build_mask_giver, is_shared=True)
        elif is_model(module):
            problem = problem or find_unknown_mask(module)
        if is_model(module):
            extend(module, "masks", _build_padding_check, is_shared=True)
    for outermost in find_outermost(model):  # code around them may create any positions
        extend(outermost, "masks", _build_call, is_shared=True)
    return "built from host memory" + (f", but not all: {problem}" if problem else "")


def _build_call(cls: Any) -> dict[str, Any]:
    """Answer transformers while the model runs, and remember its arguments."""
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # transformers' own masks hold for all batches, and for values that nobody can read.
        if torch.compiler.is_compiling() or is_transformed():
            return cls.forward(self, *args, **kwargs)
        before = _CALL.set(_describe(dict(zip(names[1:], args, strict=False)) | kwargs))
        try:
            with ANSWERS:
                return cls.forward(self, *args, **kwargs)
        finally:
            _CALL.reset(before)

    return {"forward": forward}


def _describe(arguments: dict[str, Any]) -> _Call:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    plain = (t for t in tensors.values() if type(t) is Tensor and t.dim() == 2 and has_storage(t))
    return _Call({locate(t): t for t in plain}, has_tokens_only=tensors.keys() <= _TOKENS)


def _build_mask_giver(cls: Any) -> dict[str, Any]:
    """Pass the module the full mask that it would build itself, so that the host knows it."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not args and not torch.compiler.is_compiling():
            kwargs = _add_mask(kwargs)
        return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


def _add_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    ids = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if ids is None else ids
    names = ("attention_mask", "past_key_values", "position_ids")  # which may say what is hidden
    if any(kwargs.get(name) is not None for name in names) or not isinstance(tokens, Tensor):
        return kwargs
    mask = torch.ones(tokens.shape[:2], device=tokens.device)
    fix_rows(mask, FixedRows(None, is_full=True))
    return {**kwargs, "attention_mask": mask}


def _build_padding_check(cls: Any) -> dict[str, Any]:
    """Look for padding tokens in host memory."""
    original = getattr(cls, CHECK)

    @functools.wraps(original)
    def check(self: Any, input_ids: Tensor, attention_mask: Any) -> None:
        is_asked = attention_mask is None and not is_call_traced()
        values = find_values(input_ids) if is_asked else None
        original(self, input_ids if values is None else values, attention_mask)

    return {CHECK: check}


def is_full(mask: Tensor) -> bool | None:
    """Whether a mask has no padding; None if only the device knows."""
    fixed = get_fixed_rows(_find_given(mask))
    if fixed is not None:
        return fixed.is_full
    values = find_values(mask)
    return None if values is None else bool(values.all())


def is_packed(positions: Tensor) -> bool | None:
    """Whether positions restart within a row; None if only the device knows."""
    # transformers expands a single row to all rows of the batch.
    is_expanded = positions.dim() == 2 and positions.stride(0) == 0
    values = find_values(positions[:1] if is_expanded else positions)
    if values is not None:
        return bool((values[:, 1:] != values[:, :-1] + 1).any())
    call = _CALL.get()
    # Positions computed from the tokens would have a row per sample, not one for all.
    is_one_row = get_base(positions).dim() == 1
    return False if is_one_row and call is not None and call.has_tokens_only else None


def find_values(tensor: Tensor) -> NDArray[Any] | None:
    """A tensor's values in host memory; None if they are only on the device."""
    is_readable = has_storage(tensor) and not is_transformed()
    copy = find_host_copy(_find_given(tensor)) if is_readable else None
    return copy.numpy() if copy is not None and fits_numpy(copy) else None


def _find_given(tensor: Tensor) -> Tensor:
    """The tensor of the batch at the same address, or the tensor itself."""
    call = _CALL.get()
    if call is None or type(tensor) is not Tensor:
        return tensor
    return call.tensors.get(locate(tensor), tensor)


ANSWERS = patch_masks(is_full, is_packed)
"""transformers asks the host inside."""
