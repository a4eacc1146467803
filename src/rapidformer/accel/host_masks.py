"""Answer transformers' questions about a batch from host memory, without waiting for the device.

To build an attention mask, transformers asks whether a batch has padding, and whether its positions
restart. The batch's copy in host memory has the answers. For positions that transformers' own code
creates there is no copy; they simply count up if the model was given nothing but tokens, and if all
rows share them.
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
from rapidformer.accel.unpad.fixed import FixedRows, fix_rows, get_fixed_rows
from rapidformer.compat.torch_tensors import get_base, has_storage
from rapidformer.compat.transformers_masks import ask_host_first, makes_own_mask
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.data.batch import find_host_copy, fits_numpy
from rapidformer.overlay import get_own_class

_TOKENS = {"input_ids", "inputs_embeds", "labels"}


@dataclass(frozen=True)
class _Call:
    """The arguments of the model that is running."""

    tensors: dict[Hashable, Tensor]
    """By address: a model may pass on a view of a tensor instead of the tensor itself."""
    has_tokens_only: bool


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


def apply(assembly: Assembly) -> str | None:
    """Answer transformers from host memory; the hooks come off with the row."""
    return "built from host memory" if make_masks_from_host(assembly.model) else None


def make_masks_from_host(model: nn.Module) -> bool:
    """Let transformers build this model's masks from what the host knows; False for others."""
    if not find_configs(model):
        return False
    _answer_transformers()
    for outermost in _find_outermost(model):
        _watch_calls(outermost)
    # If the whole model is compiled, our hooks stay out of its graph, as torch's own do.
    add_mask = torch.compiler.disable(_add_mask)
    for module in model.modules():
        if makes_own_mask(module):
            module.register_forward_pre_hook(add_mask, with_kwargs=True)
    return True


@functools.cache
def _answer_transformers() -> None:
    ask_host_first(is_full, is_packed, find_values)


def _add_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass the module the full mask that it would build itself, so that the host knows it."""
    ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    tokens = embeddings if ids is None else ids
    has_mask = kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None
    if args or has_mask or not isinstance(tokens, Tensor):
        return None
    mask = torch.ones(tokens.shape[:2], device=tokens.device)
    fix_rows(mask, FixedRows(None, is_full=True))
    return args, {**kwargs, "attention_mask": mask}


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
    if not has_storage(tensor):
        return None
    copy = find_host_copy(_find_given(tensor))
    return copy.numpy() if copy is not None and fits_numpy(copy) else None


def _find_given(tensor: Tensor) -> Tensor:
    """The tensor of the batch at the same address, or the tensor itself."""
    call = _CALL.get()
    if call is None or type(tensor) is not Tensor:
        return tensor
    return call.tensors.get(_locate(tensor), tensor)


def _locate(tensor: Tensor) -> Hashable:
    # The stride of a dimension of size 1 means nothing.
    strides = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tuple(strides), tensor.device


def _find_outermost(module: nn.Module) -> list[nn.Module]:
    """The outermost transformers models: code around them may create any positions."""
    if is_own_model(get_own_class(module)):
        return [module]
    return [found for child in module.children() for found in _find_outermost(child)]


def _watch_calls(model: nn.Module) -> None:
    """Remember the model's arguments while it runs."""
    names = list(inspect.signature(inspect.unwrap(model.forward)).parameters)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        located = {
            _locate(each): each
            for each in tensors.values()
            if type(each) is Tensor and each.dim() == 2 and has_storage(each)
        }
        _CALL.set(_Call(located, has_tokens_only=tensors.keys() <= _TOKENS))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _CALL.set(None)

    model.register_forward_pre_hook(torch.compiler.disable(enter), with_kwargs=True)
    model.register_forward_hook(torch.compiler.disable(leave), always_call=True)
