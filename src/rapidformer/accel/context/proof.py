"""A few tokens through the user's own model, whole and shared out: both must agree.

What a reader would get wrong: no list of families decides what may be shared. A block may mix
tokens by a convolution, by a state, by a bias of positions; none of that passes through attention,
and nothing would fail. Seen is what it does to the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapidformer.dist.context_region import ContextRegion
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.tensor_plans import describe_model

_LARGEST_DIFFERENCE = 1e-3
"""Of the largest output: far above round-off, far below what a lost token does."""


def prove_context(model: Any, region: ContextRegion) -> None:
    """Raise where sharing tokens changes what the model computes; all processes come here."""
    inputs = _build_inputs(model, region)
    if inputs is None:
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            region.is_off = True
            whole = _run(model, inputs)
            region.is_off = False
            shared = _run(model, inputs)
    except RapidformerError:
        raise
    except Exception as reason:  # a block may choke on a share in any way it likes
        finding = f"it fails ({str(reason).rstrip('.')})"
        raise ConfigurationError(_explain(model, region, finding)) from reason
    finally:
        region.is_off = False
        model.train(was_training)
    scale = whole.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    difference = float((whole - shared).abs().max() / scale)
    if not difference <= _LARGEST_DIFFERENCE:
        raise ConfigurationError(
            _explain(model, region, f"outputs differ by {difference:.0e} of the largest")
        )


def _explain(model: Any, region: ContextRegion, finding: str) -> str:
    return (
        f"--context-parallel-size {region.size} cannot share the sequences of "
        f"{describe_model(model)}: something besides its attention looks at all tokens, or at all "
        f"heads. Tried on a few tokens, whole and shared out, {finding}. Leave it out; "
        "--zero-3-memory-optimization and --checkpoint-activations save memory on any model."
    )


def _build_inputs(model: Any, region: ContextRegion) -> dict[str, Tensor] | None:
    """Two rows of words, one of them padded; None where the model takes something else."""
    has_words = getattr(model, "main_input_name", "") == "input_ids"
    if not has_words or any(p.is_meta for p in model.parameters()):
        return None
    embedding = model.get_input_embeddings()
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 4096
    length = min(4 * region.size - 1, limit - 2)  # RoBERTa counts positions from 2
    if not region.can_share(length):
        return None
    dice = torch.Generator().manual_seed(0)
    words = min(embedding.num_embeddings, 5000)
    # Not the first ones: padding and its like mean something to some models.
    ids = torch.randint(min(5, words - 1), words, (2, length), generator=dice)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    if isinstance(output, Tensor):
        return output.float()
    found: Tensor = output[0]
    return found.float()
