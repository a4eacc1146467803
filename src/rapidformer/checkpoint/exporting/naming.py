"""A model's tensors by the names, and in the form, that its files have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapidformer.compat.torch_tensors import get_storage_key
from rapidformer.models.gpt import GPTModel
from rapidformer.models.gpt.conversion import convert_config, convert_weights


def name_for_files(model: Any) -> tuple[Any, dict[str, Tensor]]:
    """The configuration and the tensors to write; must be called while tensors are recorded.

    transformers joins or renames some weights when it loads a model (experts, above all), which is
    undone here. A model of ours becomes one that transformers has.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if isinstance(model, GPTModel):
        model = _convert_own(model)
    weights: dict[str, Tensor] = drop_ties(model, model.state_dict())
    return model.config, revert_weight_conversion(model, weights)


def drop_ties(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without further names of tied ones, which transformers ties again."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}

    def is_tied(name: str) -> bool:
        first = weights.get(ties.get(name, ""))
        return first is not None and get_storage_key(first) == get_storage_key(weights[name])

    return {name: tensor for name, tensor in weights.items() if not is_tied(name)}


def _convert_own(model: GPTModel) -> Any:
    import transformers

    config = convert_config(model.config)
    with torch.device("meta"):
        theirs = getattr(transformers, config.architectures[0])(config)
    weights = convert_weights(model.config, model.state_dict())
    # Only further names of tied weights may be missing: tie_weights gives them theirs.
    problems = theirs.load_state_dict(weights, strict=False, assign=True)
    left = set(problems.missing_keys) - set(theirs.all_tied_weights_keys)
    assert not left and not problems.unexpected_keys, (left, problems.unexpected_keys)
    theirs.tie_weights()
    return theirs
