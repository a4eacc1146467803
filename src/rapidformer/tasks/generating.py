"""Generate text batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn


def generate(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    tokenizer: Any,
    *,
    num_beams: int,
    max_new_tokens: int,
) -> list[np.ndarray]:
    """Greedy or beam search; one array of ids per row."""
    options: dict[str, Any] = {}
    config: Any = model.generation_config
    if config.pad_token_id is None:
        options["pad_token_id"] = tokenizer.pad_token_id
    if config.eos_token_id is None and tokenizer.eos_token_id is not None:
        options["eos_token_id"] = tokenizer.eos_token_id
    ids = model.generate(  # type: ignore[operator]
        input_ids=batch["input_ids"],
        attention_mask=batch.get("attention_mask"),
        num_beams=num_beams,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        **options,
    )
    return list(ids.cpu().numpy())
