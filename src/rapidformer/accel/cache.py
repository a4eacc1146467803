"""Turn off the key/value cache when a loss is computed.

A Hugging Face model fills one in every call. It is meant for generation, and otherwise only keeps
all keys and values alive. The configuration does not change, so ``generate`` and an exported model
use the cache as before; so does a call with ``use_cache=True``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.assembly import Assembly
from rapidformer.compat.transformers_models import is_own_model
from rapidformer.models.adapters import get_base
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.towers import get_text_config
from rapidformer.overlay import get_own_class

_NAME = "use_cache"


def apply(assembly: Assembly) -> str | None:
    """Fill no cache in training."""
    if (handle := skip_cache_in_training(assembly.model)) is None:
        return None
    assembly.applied.keep_hook(handle)
    return "models of transformers keep no keys and values"


def skip_cache_in_training(model: nn.Module) -> RemovableHandle | None:
    """Pass ``use_cache=False`` in training and with labels, unless the call says something else."""
    if not takes_use_cache(model):
        return None
    names = _list_parameters(get_base(model))
    position = names.index(_NAME) if _NAME in names else None

    def skip(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_given = kwargs.get(_NAME) is not None or (position is not None and len(args) > position)
        is_training = module.training and torch.is_grad_enabled()
        if is_given or not (is_training or kwargs.get("labels") is not None):
            return None
        if _tells_examples_apart(module, kwargs):
            return None
        return args, {**kwargs, _NAME: False}

    # Kept out of a model compiled as a whole, like torch's own hooks.
    return model.register_forward_pre_hook(torch.compiler.disable(skip), with_kwargs=True)


def _tells_examples_apart(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a cache decides what a model sees: with one, transformers does not look whether
    positions start again, and packed examples attend to each other."""
    if kwargs.get("position_ids") is None or kwargs.get("attention_mask") is not None:
        return False
    config = getattr(get_base(model), "config", None)
    return config is not None and bool(getattr(get_text_config(config), "use_cache", False))


def takes_use_cache(model: nn.Module) -> bool:
    """Whether a model can be told to fill no cache."""
    inner = get_base(model)
    names = _list_parameters(inner)
    return _NAME in names or _passes_on(inner, names)


def _list_parameters(model: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(model.forward)).parameters)


def _passes_on(model: Any, names: list[str]) -> bool:
    """Whether a causal language model takes it as one of ``**kwargs``, for the model inside."""
    body = getattr(model, "base_model", model)
    takes_any = "kwargs" in names and body is not model and shifts_labels(model)
    # A user's model may pass the argument itself, next to its `**kwargs`.
    if not takes_any or not is_own_model(get_own_class(model)):
        return False
    inside = _list_parameters(body)
    # A model that also sees passes it on to its language model.
    return _NAME in inside or ("kwargs" in inside and _NAME in _list_parameters(body.get_decoder()))
