"""The same GPT with Hugging Face's interface: what ``AutoModelForCausalLM`` returns for its folder.

Weights and configuration are ``GPTModel``'s, so a model pre-trained in Megatron's form can be
fine-tuned, evaluated and sampled from in this one. Here labels equal the inputs and the model
shifts them, and True in a mask means "may look".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from rapidformer.models.gpt.layers import compute_token_losses
from rapidformer.models.gpt.model import GPTModel


class GPTForCausalLM(GPTModel):
    """``GPTModel`` with Hugging Face's inputs and output object."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits and, with labels, the mean loss over labelled tokens plus the mixtures' losses."""
        if attention_mask is not None and attention_mask.dtype is torch.bool:
            attention_mask = ~attention_mask if attention_mask.dim() == 4 else attention_mask
        hidden, moe_losses = self.transform(
            input_ids, position_ids, attention_mask, past_key_values
        )
        logits = self.output(hidden[:, -logits_to_keep:])
        loss: Any = None
        if labels is not None:
            following = functional.pad(labels[:, 1:], (0, 1), value=-100)
            count = (following != -100).sum().clamp(min=1)
            loss = compute_token_losses(logits, following).sum() / count
            if moe_losses:
                loss = loss + self.moe_loss_coeff * sum(moe_losses)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
