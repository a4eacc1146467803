"""Run a few tokens through the user's own model, whole and split: both must agree.

There is no list of supported families. A block may mix tokens by a convolution, a state or a
position bias; none of that goes through attention, and nothing would fail. So the effect on the
outputs is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapidformer.compat.torch_modules import uncompiled
from rapidformer.dist.context_region import ContextRegion
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.tensor_plans import describe_model

_LARGEST_DIFFERENCE = 1e-3
"""Relative to the largest output: far above round-off, far below what a lost token causes."""


def prove_context(model: Any, region: ContextRegion) -> None:
    """Raise if splitting tokens changes what the model computes; all ranks must call this."""
    inputs = _build_inputs(model, region)
    if inputs is None:
        return
    try:
        # Nothing else would use what these two calls compile.
        with evaluation_mode(model), torch.no_grad(), uncompiled(model.modules()):
            region.is_off = True
            whole = _run(model, inputs)
            region.is_off = False
            shared = _run(model, inputs)
    except RapidformerError:
        raise
    except Exception as reason:  # a block may fail on a slice in any way
        finding = f"it fails ({str(reason).rstrip('.')})"
        raise ConfigurationError(_explain(model, region, finding)) from reason
    finally:
        region.is_off = False
    scale = whole.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    difference = float((whole - shared).abs().max() / scale)
    if not difference <= _LARGEST_DIFFERENCE:
        raise ConfigurationError(
            _explain(model, region, f"outputs differ by {difference:.0e} of the largest")
        )


def _explain(model: Any, region: ContextRegion, finding: str) -> str:
    return (
        f"--context-parallel-size {region.size} cannot split the sequences of "
        f"{describe_model(model)}: something besides its attention uses all tokens, or all heads. "
        f"In a trial on a few tokens, whole and split, {finding}. Remove the switch; "
        "--zero-3-memory-optimization and --checkpoint-activations save memory on any model."
    )


def _build_inputs(model: Any, region: ContextRegion) -> dict[str, Tensor] | None:
    """Two rows of tokens, one of them padded; None if the model takes something else."""
    has_words = getattr(model, "main_input_name", "") == "input_ids"
    if not has_words or any(p.is_meta for p in model.parameters()):
        return None
    embedding = model.get_input_embeddings()
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 4096
    length = min(4 * region.size - 1, limit - 2)  # RoBERTa counts positions from 2
    if not region.can_split(length):
        return None
    dice = torch.Generator().manual_seed(0)
    words = min(getattr(embedding, "base_layer", embedding).num_embeddings, 5000)  # in an adapter
    # Not the first ids: padding and similar tokens are special in some models.
    ids = torch.randint(min(5, words - 1), words, (2, length), generator=dice)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first.float()
