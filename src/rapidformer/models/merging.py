"""Merge adapters into the weights under them: a plain model with the same outputs.

The trained model may be split over ranks and must stay as it is, so a second one is built, gets the
trained weights (all of them, if the base model is in no file), and is merged by peft.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.errors import ModelError
from rapidformer.hub import quiet_transformers
from rapidformer.models.adapters import Adapter
from rapidformer.models.location import check_folder, explain_failure
from rapidformer.models.quantizing import forget_quantization
from rapidformer.overlay import get_own_class


def build_merged(
    model: Any,
    adapter: Adapter,
    weights: Mapping[str, Tensor],
    check_base: Callable[[Mapping[str, Tensor]], None] = lambda weights: None,
) -> nn.Module:
    """A plain model with the merged weights, in host memory; ``weights`` are whole, by name.

    Those of a base model that can be loaded again are not needed: ``check_base`` may refuse the
    weights that its files have.
    """
    from peft import get_peft_model

    check_mergeable(adapter)
    if not hasattr(model, "config"):
        raise ModelError(
            f"{type(model).__name__} has no config to build a second one from, so its adapters "
            "cannot be merged: export them with merge=False."
        )
    cls, config, fresh = get_own_class(model), copy.deepcopy(model.config), set[str]()
    if adapter.base is None:
        with torch.device("meta"):
            base = cls(config)
    else:
        # In full precision: a run may have rounded its own copy.
        forget_quantization(config, adapter.base)
        base, fresh = load_base(cls, adapter.base, config)
        check_base({name: w for name, w in base.state_dict().items() if name not in fresh})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = get_peft_model(base, copy.deepcopy(adapter.config), adapter.name)
    inner = adapted.get_base_model()
    # peft merges in place, and without sharding these are the trained model's own tensors.
    copies = {name: w.clone() if ".base_layer." in name else w for name, w in weights.items()}
    result = inner.load_state_dict(copies, strict=False, assign=True)
    random = fresh & {name.replace(".base_layer.", ".") for name in result.missing_keys}
    if random:
        raise ModelError(
            f"the base model {adapter.base} lacks {', '.join(sorted(random))} in the shape that "
            "this model has (was its vocabulary resized?), so the adapter cannot be merged: train "
            "and save these layers with it (modules_to_save), or save the changed model first and "
            "train on that."
        )
    inner.tie_weights()
    return merge(adapted)


def check_mergeable(adapter: Adapter | None) -> None:
    """Refuse learned tokens: no weights under them could take them in."""
    if adapter is not None and adapter.is_prompt:
        raise ModelError(
            f"{adapter.config.peft_type.value} prepends learned tokens and cannot be merged into "
            "the model's weights: export the adapter alone (--no-merge, or merge=False)."
        )


def load_base(cls: Any, location: str, config: Any) -> tuple[nn.Module, set[str]]:
    """A model in full precision, and the names of weights that its files lack in this shape."""
    check_folder(location, needs_weights=True)
    with quiet_transformers(location), explain_failure(location, "model"):
        model, report = cls.from_pretrained(
            location, config=copy.deepcopy(config), dtype=torch.float32,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    return model, {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}


def merge(adapted: Any) -> nn.Module:
    """The plain model inside a ``PeftModel``, with its adapters merged."""
    try:
        merged: nn.Module = adapted.merge_and_unload()
    except (ValueError, NotImplementedError, AttributeError) as reason:
        text = " ".join(str(reason).split())[:300]
        raise ModelError(f"these adapters cannot be merged: {text}") from None
    merged.__dict__.pop("peft_config", None)
    return merged
