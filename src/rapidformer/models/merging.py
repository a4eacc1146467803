"""Merge adapters into the weights under them: a plain model with the same outputs.

The trained model may be split over ranks and must stay as it is, so a second one is built without
memory, gets the whole weights, and is merged by peft.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.errors import ModelError
from rapidformer.models.adapters import Adapter
from rapidformer.overlay import get_own_class


def build_merged(model: Any, adapter: Adapter, weights: Mapping[str, Tensor]) -> nn.Module:
    """A plain model with the merged weights, in host memory; ``weights`` are whole, by name."""
    from peft import get_peft_model

    if adapter.is_prompt:
        raise ModelError(
            f"{adapter.config.peft_type.value} prepends learned tokens and cannot be merged into "
            "the model's weights: export the adapter (merge=False)."
        )
    config = copy.deepcopy(adapter.config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = get_own_class(model)(copy.deepcopy(model.config))
        adapted: Any = get_peft_model(empty, config, adapter.name)
    inner = adapted.get_base_model()
    inner.load_state_dict(dict(weights), strict=False, assign=True)
    inner.tie_weights()
    return merge(adapted)


def merge(adapted: Any) -> nn.Module:
    """The plain model inside a ``PeftModel``, with its adapters merged."""
    try:
        merged: nn.Module = adapted.merge_and_unload()
    except (ValueError, NotImplementedError, AttributeError) as reason:
        text = " ".join(str(reason).split())[:300]
        raise ModelError(f"these adapters cannot be merged: {text}") from None
    merged.__dict__.pop("peft_config", None)
    return merged
