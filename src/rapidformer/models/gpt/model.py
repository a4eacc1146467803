"""``GPTModel``: a decoder with Megatron's calling convention.

    losses = model(tokens, position_ids, attention_mask, labels=labels)   # [batch, tokens], fp32
    logits = model(tokens, position_ids, attention_mask)                  # [batch, tokens, vocab]

``labels`` are *not* shifted here: ``labels[:, i]`` is the token after ``tokens[:, i]``, as in
Megatron's data. ``GPTForCausalLM`` is the same model with Hugging Face's interface, which shifts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast

from rapidformer.errors import ModelError
from rapidformer.models.gpt.configuration import GPTConfig, config_from_context
from rapidformer.models.gpt.experts import Experts, MixtureOfExperts
from rapidformer.models.gpt.layers import (
    ResidualLinear,
    TransformerLayer,
    build_norm,
    build_rotation,
    build_visibility,
    compute_token_losses,
)
from rapidformer.models.plan import ModelPlan

_TENSOR_PLAN = {
    "word_embeddings": "embedding_rowwise", "output": "colwise_gather_output",
    "layers.*.attention.query": "colwise", "layers.*.attention.key": "key_value",
    "layers.*.attention.value": "key_value", "layers.*.attention.output": "rowwise",
    "layers.*.feed_forward.gate": "colwise", "layers.*.feed_forward.up": "colwise",
    "layers.*.feed_forward.down": "rowwise",
}  # fmt: skip


class GPTModel(PreTrainedModel, GenerationMixin):
    """A GPT with learned or rotary positions; grouped queries, SwiGLU and experts are options.

    Without a configuration, sizes come from the current run's flags (``get_args()``). The other
    parameters are Megatron's: the whole model is always built, and the switches split it.

    A call returns the logits if there are no labels; with labels, the loss of every token, and with
    experts a tuple ``(losses, moe_loss of the first mixture, of the second, ...)``. Each moe_loss
    is 1 if the experts are equally loaded; the loss to minimise is ``mean of losses +
    model.moe_loss_coeff * sum(moe_losses)``.
    """

    config_class = GPTConfig
    config: GPTConfig
    _tied_weights_keys = {"output.weight": "word_embeddings.weight"}  # noqa: RUF012
    _no_split_modules = ["TransformerLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(
        self,
        config: GPTConfig | None = None,
        *,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        if num_tokentypes:
            raise ModelError(
                f"GPTModel(num_tokentypes={num_tokentypes}): a GPT has no token types, leave it at "
                "0."
            )
        if not (pre_process and post_process):
            raise ModelError(
                "GPTModel builds the whole model, never a stage of it: pre_process and "
                "post_process must be True."
            )
        config = config if config is not None else config_from_context()
        super().__init__(config)
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        has_positions = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, size) if has_positions else None
        )
        self.layers = nn.ModuleList(TransformerLayer(config, i) for i in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.output = nn.Linear(size, config.vocab_size, bias=False)
        if config.tokenizer_vocab_size is not None:
            padding = range(config.tokenizer_vocab_size, config.vocab_size)
            self.generation_config.suppress_tokens = list(padding) or None
        self.post_init()

    @property
    def moe_loss_coeff(self) -> float:
        """The factor for the sum of the mixtures' losses in the total loss."""
        return self.config.moe_loss_coeff

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        tokentype_ids: None = None,
        *,
        forward_method_parallel_output: bool | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = False,
    ) -> Any:
        """Token losses, or logits without labels.

        ``attention_mask`` is Megatron's (bool, True = hidden) or None for plain causal, the fast
        path. The parameters after ``labels`` are for old scripts and for ``generate``.
        """
        hidden, moe_losses = self.transform(
            input_ids, position_ids, attention_mask, past_key_values
        )
        logits = self.output(hidden[:, -logits_to_keep:])
        if return_dict or past_key_values is not None:
            # Only `generate` has a cache, and some of its strategies do not ask for an object.
            return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        if labels is None:
            return logits
        losses = compute_token_losses(logits, labels)
        return (losses, *moe_losses) if moe_losses else losses

    def transform(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The hidden states after the last norm, and the loss of each mixture of experts."""
        if cache is not None and cache.is_compileable:
            # It comes with a four-dimensional mask in which True means the opposite.
            raise ModelError("GPTModel generates with a growing cache: use the dynamic one.")
        past = cache.get_seq_length() if cache is not None else 0
        hidden, position_ids = self._embed(input_ids, position_ids, past)
        visible = build_visibility(attention_mask, input_ids, past)
        has_rotation = self.config.position_embedding_type == "rope"
        rotation = build_rotation(position_ids, self.config) if has_rotation else None
        moe_losses: list[Tensor] = []
        for layer in self.layers:
            hidden = layer(hidden, visible, rotation, cache)
            if isinstance(hidden, tuple):
                hidden, moe_loss = hidden
                moe_losses.append(moe_loss)
        return self.final_norm(hidden), moe_losses

    def _embed(
        self, input_ids: Tensor, position_ids: Tensor | None, past: int
    ) -> tuple[Tensor, Tensor]:
        end = past + input_ids.shape[1]
        if self.position_embeddings is not None and end > self.config.max_position_embeddings:
            raise ModelError(
                f"{end} tokens are more than the {self.config.max_position_embeddings} positions "
                "that this model has learned: shorten the rows, or build the model with more "
                "--max-position-embeddings."
            )
        if position_ids is None:
            position_ids = torch.arange(past, end, device=input_ids.device).unsqueeze(0)
        hidden = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids)
        hidden = functional.dropout(hidden, self.config.hidden_dropout, self.training)
        return hidden, position_ids

    # ---- what the library and transformers call ------------------------------------------------

    def rapidformer_plan(self) -> ModelPlan:
        """Where the blocks are and how layers may be split."""
        problem = "adds a loss of its own in every mixture of experts, which stages cannot pass on."
        has_experts = any(isinstance(module, MixtureOfExperts) for module in self.modules())
        return ModelPlan(
            blocks=("layers",), tensor=_TENSOR_PLAN, experts=("layers.*.feed_forward.experts",),
            has_split_sequences=True, has_split_losses=True, has_split_attention=True,
            token_dims={"rotation": 2}, pipeline_problem=problem if has_experts else "",
        )  # fmt: skip

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.word_embeddings = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.output = new_embeddings  # type: ignore[assignment]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial weights; transformers calls this for every module, even if a file lacks it."""
        std = self.config.init_method_std
        # Every layer adds two updates to the residual stream; this keeps its variance constant.
        small_std = std / math.sqrt(2 * self.config.num_layers)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            is_residual = isinstance(module, ResidualLinear)
            initialization.normal_(module.weight, std=small_std if is_residual else std)
        elif isinstance(module, Experts):
            for weight in (module.gate, module.up):
                if weight is not None:
                    initialization.normal_(weight, std=std)
            initialization.normal_(module.down, std=small_std)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            initialization.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if bias is not None:
            initialization.zeros_(bias)


class GPTForCausalLM(GPTModel):
    """``GPTModel`` with Hugging Face's interface: what ``AutoModelForCausalLM`` returns.

    Weights and configuration are the same, so a model pre-trained in Megatron's form can be
    fine-tuned, evaluated and sampled from in this one. Here labels equal the inputs and the model
    shifts them, and True in a mask means "may look".
    """

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
