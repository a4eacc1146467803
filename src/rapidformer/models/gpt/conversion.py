"""A ``GPTModel`` as transformers' GPT-2, Llama or Mixtral; other options are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rapidformer.errors import ModelError
from rapidformer.models.gpt.configuration import GPTConfig

Weights = dict[str, Tensor]

# Our names of sizes and options to those of each family's configuration.
_SHARED = {
    "vocab_size": "vocab_size", "tie_word_embeddings": "tie_word_embeddings",
    "init_method_std": "initializer_range", "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id", "pad_token_id": "pad_token_id",
}  # fmt: skip
_GPT2_SIZES = _SHARED | {
    "hidden_size": "n_embd", "num_layers": "n_layer", "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner", "max_position_embeddings": "n_positions",
    "layernorm_epsilon": "layer_norm_epsilon", "attention_dropout": "attn_pdrop",
}  # fmt: skip
_LLAMA_SIZES = _SHARED | {
    "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings", "layernorm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
}  # fmt: skip
# Our names of modules to theirs.
_GPT2_ENDS = {
    "word_embeddings": "transformer.wte", "position_embeddings": "transformer.wpe",
    "final_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
_LLAMA_ENDS = {
    "word_embeddings": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
_LLAMA_NAMES = {
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj", "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj", "feed_forward.router": "mlp.gate",
}  # fmt: skip


def convert_config(config: GPTConfig) -> Any:
    """The configuration of the model of transformers that is the same; refuses if there is none."""
    import transformers

    reasons = list(_find_problems(config))
    if reasons:
        raise ModelError(
            f"this GPTModel has no equivalent in transformers: {'; '.join(reasons)}. Load the "
            "folder with rapidformer.GPTModel.from_pretrained instead."
        )
    sizes = _GPT2_SIZES if _is_gpt2(config) else _LLAMA_SIZES
    values = {theirs: getattr(config, ours) for ours, theirs in sizes.items()}
    if _is_gpt2(config):
        return transformers.GPT2Config(
            **values, resid_pdrop=config.hidden_dropout, embd_pdrop=config.hidden_dropout,
            architectures=["GPT2LMHeadModel"],
        )  # fmt: skip
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_base}
    num_experts, bias = max(config.experts_per_layer), config.add_bias_linear
    if num_experts > 1:
        return transformers.MixtralConfig(
            **values, num_local_experts=num_experts, num_experts_per_tok=config.moe_router_topk,
            router_aux_loss_coef=config.moe_loss_coeff, architectures=["MixtralForCausalLM"],
        )  # fmt: skip
    return transformers.LlamaConfig(
        **values, attention_bias=bias, mlp_bias=bias, architectures=["LlamaForCausalLM"]
    )


def convert_weights(config: GPTConfig, weights: Mapping[str, Tensor]) -> Weights:
    """The weights by the names and in the shapes of that model."""
    convert_layer = _convert_gpt2_layer if _is_gpt2(config) else _convert_llama_layer
    named: Weights = {}
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        named |= convert_layer(i, layer)
    for ours, theirs in (_GPT2_ENDS if _is_gpt2(config) else _LLAMA_ENDS).items():
        named |= {
            theirs + name.removeprefix(ours): weight
            for name, weight in weights.items()
            if name.startswith(f"{ours}.")
        }
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    return named


def _is_gpt2(config: GPTConfig) -> bool:
    return config.position_embedding_type == "learned_absolute"


def _find_problems(config: GPTConfig) -> Iterator[str]:
    """What the family that comes nearest does not have."""
    has_experts = max(config.experts_per_layer) > 1
    if _is_gpt2(config):
        if config.normalization != "LayerNorm":
            yield f"learned positions with {config.normalization} (GPT-2 has LayerNorm)"
        if config.swiglu:
            yield "learned positions with SwiGLU (GPT-2 has GELU)"
        if config.num_query_groups != config.num_attention_heads:
            yield "learned positions with grouped queries"
        if has_experts:
            yield "learned positions with a mixture of experts"
        return
    if config.position_embedding_type != "rope":
        yield "no position embeddings"
    elif config.rotary_percent != 1.0:
        yield f"rotary positions on {config.rotary_percent:g} of each head (Llama: on all of it)"
    if config.normalization != "RMSNorm":
        yield f"rotary positions with {config.normalization} (Llama has RMSNorm)"
    if not config.swiglu:
        yield "rotary positions with GELU (Llama has SwiGLU)"
    if has_experts and len(set(config.experts_per_layer)) > 1:
        yield "layers with different numbers of experts (Mixtral has the same in all)"
    if has_experts and config.moe_router_topk == 1:
        yield "one expert for each token, weighted by its probability"
    if has_experts and config.add_bias_linear:
        yield "a mixture of experts with biases in attention"


def _convert_gpt2_layer(number: int, layer: Weights) -> Weights:
    """GPT-2 keeps its matrices the other way round, and joins query, key and value."""
    named: Weights = {}

    def put(theirs: str, weight: Tensor, bias: Tensor | None) -> None:
        named[f"transformer.h.{number}.{theirs}.weight"] = weight.t().contiguous()
        # A model without biases is one whose biases are zero.
        zeros = torch.zeros(weight.shape[0], dtype=weight.dtype)
        named[f"transformer.h.{number}.{theirs}.bias"] = zeros if bias is None else bias

    parts = [f"attention.{name}" for name in ("query", "key", "value")]
    biases = [layer[f"{part}.bias"] for part in parts if f"{part}.bias" in layer]
    joined = torch.cat([layer[f"{part}.weight"] for part in parts])
    put("attn.c_attn", joined, torch.cat(biases) if biases else None)
    for ours, theirs in (
        ("attention.output", "attn.c_proj"), ("feed_forward.up", "mlp.c_fc"),
        ("feed_forward.down", "mlp.c_proj"),
    ):  # fmt: skip
        put(theirs, layer[f"{ours}.weight"], layer.get(f"{ours}.bias"))
    for ours, theirs in (("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2")):
        for kind in ("weight", "bias"):
            named[f"transformer.h.{number}.{theirs}.{kind}"] = layer[f"{ours}.{kind}"]
    return named


def _convert_llama_layer(number: int, layer: Weights) -> Weights:
    """The same matrices by other names; a mixture's experts are joined and turned."""
    prefix, named = f"model.layers.{number}.", {}
    for name, weight in layer.items():
        module, _, kind = name.rpartition(".")
        if module in _LLAMA_NAMES:
            named[f"{prefix}{_LLAMA_NAMES[module]}.{kind}"] = weight
    if "feed_forward.experts.up" in layer:
        experts = {part: layer[f"feed_forward.experts.{part}"] for part in ("gate", "up", "down")}
        joined = torch.cat([experts["gate"], experts["up"]], dim=-1)
        named[f"{prefix}mlp.experts.gate_up_proj"] = joined.transpose(1, 2).contiguous()
        named[f"{prefix}mlp.experts.down_proj"] = experts["down"].transpose(1, 2).contiguous()
    return named
