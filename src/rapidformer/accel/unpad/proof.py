"""Check on the model itself whether it gives the same results without padding.

There is no list of supported model families. A small batch runs through the user's model twice,
padded and unpadded, and logits and gradients must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.unpad.sides import is_encoder_decoder
from rapidformer.errors import ModelError
from rapidformer.models.evaluation_mode import evaluation_mode
from rapidformer.models.plan import ModelPlan

_LENGTHS = (9, 4, 6)
_LIMIT = 1e-4
_LIMIT_16_BIT = 3e-2

Forward = Callable[[dict[str, Any]], Any]


def find_difference(
    model: nn.Module,
    plan: ModelPlan,
    plain: Forward,
    unpadded: Forward,
    dtype: torch.dtype | None = None,
    *,
    is_packed: bool = False,
) -> str | None:
    """How two forward passes of one model differ; None if they agree.

    They are compared in the model's own dtype and, on a GPU, under autocast to ``dtype``, which
    runs other kernels. The batch is padded, or has packed examples.
    """
    device = next(model.parameters()).device
    try:
        with evaluation_mode(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
            # Not torch.manual_seed: it also seeds GPUs, whose states are not restored here.
            torch.default_generator.manual_seed(0)
            batch = _make_packed_batch(model) if is_packed else _make_batch(model)
            if is_encoder_decoder(model):
                batch = _add_labels(batch)
            difference = _compare(model, plan, plain, unpadded, batch)
            if difference is None and dtype is not None and device.type == "cuda":
                with torch.autocast(device.type, dtype=dtype):
                    difference = _compare(model, plan, plain, unpadded, batch, _LIMIT_16_BIT)
            return difference
    except ModelError as error:
        return str(error)
    except Exception as error:  # a model's code may raise anything on tensors it does not expect
        reason = str(error).splitlines()[0] if str(error) else ""
        return f"it fails with {type(error).__name__}: {reason}"


def _compare(
    model: nn.Module,
    plan: ModelPlan,
    plain: Forward,
    unpadded: Forward,
    batch: dict[str, Any],
    limit: float = _LIMIT,
) -> str | None:
    """Compare the logits, and the gradients of the first and the last block."""
    blocks = plan.get_blocks(model)
    ends = [blocks[0], *([blocks[-1]] if len(blocks) > 1 else [])]
    weights = [p for block in ends for p in block.parameters() if p.requires_grad]
    expected = _run(plain, batch, weights)
    found = _run(unpadded, batch, weights)
    if expected[0].dtype in (torch.float16, torch.bfloat16):
        limit = _LIMIT_16_BIT
    names = ["logits", *["gradients"] * len(weights)]
    sizes = [float(each.abs().max()) for each in expected]
    # A gradient that is zero in theory, such as that of the key bias, is nothing but noise. It is
    # compared relative to the largest gradient instead.
    least = (0.01 if limit == _LIMIT else 0.1) * max(sizes[1:], default=0.0)
    for name, mine, theirs, size in zip(names, found, expected, sizes, strict=True):
        scale = size if name == "logits" else max(size, least)
        if not (mine - theirs).abs().max() <= limit * max(scale, 1e-3):
            return f"{name} differ"
    return None


def _make_batch(model: Any) -> dict[str, Any]:
    words = min(int(getattr(model.config, "vocab_size", 0)), 1000)
    if words < 20:
        raise ModelError("its configuration has no vocab_size, or one below 20")
    device = next(model.parameters()).device
    ids = torch.randint(10, words, (len(_LENGTHS), max(_LENGTHS)))
    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    pad = getattr(model.config, "pad_token_id", None)
    ids = ids.masked_fill(~mask, 0 if pad is None or pad < 0 else pad)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def _add_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Add labels for a decoder: the same tokens, but with other row lengths than the encoder's."""
    is_label = batch["attention_mask"].flip(0).bool()
    labels = batch["input_ids"].flip(0).masked_fill(~is_label, -100)
    return {**batch, "labels": labels, "use_cache": False}


def _make_packed_batch(model: Any) -> dict[str, Any]:
    """The same tokens as three examples in one row, told apart by positions that restart."""
    batch = _make_batch(model)
    ids = batch["input_ids"][batch["attention_mask"].bool()][None]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions.to(ids.device), "use_cache": False}


def _run(forward: Forward, batch: dict[str, Any], weights: Sequence[Tensor]) -> list[Tensor]:
    """The logits of real tokens, and the gradients of ``weights``."""
    outputs = forward(dict(batch))
    if hasattr(outputs, "start_logits"):
        raise ModelError("its loss compares all positions of a row, padding included")
    logits = outputs.logits
    if "labels" in batch:
        logits = logits[batch["labels"] != -100]
    elif logits.dim() == 3 and "attention_mask" in batch:
        logits = logits[batch["attention_mask"].bool()]
    direction = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    # The loss is a weighted sum with different weights, so that differences cannot cancel out.
    gradients = (
        torch.autograd.grad((logits.float() * direction).sum(), weights, allow_unused=True)
        if weights
        else ()
    )
    return [logits.detach(), *(g if g is not None else torch.zeros(()) for g in gradients)]
