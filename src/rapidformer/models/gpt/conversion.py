"""A ``GPTModel`` as a model of transformers with the same outputs: GPT-2, Llama or Mixtral.

Options that none of the three has are refused; plain transformers could not compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rapidformer.errors import ModelError
from rapidformer.models.gpt.configuration import GPTConfig

Weights = dict[str, Tensor]


def convert_config(config: GPTConfig) -> Any:
    """The configuration of the model of transformers that is the same; refuses if there is none."""
    kind, reasons = _find_kind(config)
    if reasons:
        raise ModelError(
            f"this GPTModel has no equivalent in transformers: {'; '.join(reasons)}. Load the "
            "folder with rapidformer.GPTModel.from_pretrained instead."
        )
    return _CONFIGS[kind](config)


def convert_weights(config: GPTConfig, weights: Mapping[str, Tensor]) -> Weights:
    """The weights by the names and in the shapes of that model."""
    kind, _ = _find_kind(config)
    named: Weights = {}
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        layer = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        named |= _convert_gpt2_layer(i, layer) if kind == "gpt2" else _convert_llama_layer(i, layer)
    names = _GPT2_ENDS if kind == "gpt2" else _LLAMA_ENDS
    for ours, theirs in names.items():
        named |= {
            theirs + name.removeprefix(ours): weight
            for name, weight in weights.items()
            if name.startswith(f"{ours}.")
        }
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    return named


_GPT2_ENDS = {
    "word_embeddings": "transformer.wte", "position_embeddings": "transformer.wpe",
    "final_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
_LLAMA_ENDS = {
    "word_embeddings": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head",
}  # fmt: skip


def _find_kind(config: GPTConfig) -> tuple[str, list[str]]:
    """The model that comes nearest, and what it does not have."""
    if config.position_embedding_type == "learned_absolute":
        return "gpt2", list(_find_gpt2_problems(config))
    has_experts = max(config.experts_per_layer) > 1
    problems = list(_find_llama_problems(config))
    return ("mixtral", [*problems, *_find_mixtral_problems(config)]) if has_experts else (
        "llama", problems
    )  # fmt: skip


def _find_gpt2_problems(config: GPTConfig) -> Iterator[str]:
    if config.normalization != "LayerNorm":
        yield f"learned positions with {config.normalization} (GPT-2 has LayerNorm)"
    if config.swiglu:
        yield "learned positions with SwiGLU (GPT-2 has GELU)"
    if config.num_query_groups != config.num_attention_heads:
        yield "learned positions with grouped queries"
    if max(config.experts_per_layer) > 1:
        yield "learned positions with a mixture of experts"


def _find_llama_problems(config: GPTConfig) -> Iterator[str]:
    if config.position_embedding_type != "rope":
        yield "no position embeddings"
    elif config.rotary_percent != 1.0:
        yield f"rotary positions on {config.rotary_percent:g} of each head (Llama: on all of it)"
    if config.normalization != "RMSNorm":
        yield f"rotary positions with {config.normalization} (Llama has RMSNorm)"
    if not config.swiglu:
        yield "rotary positions with GELU (Llama has SwiGLU)"


def _find_mixtral_problems(config: GPTConfig) -> Iterator[str]:
    if len(set(config.experts_per_layer)) > 1:
        yield "layers with different numbers of experts (Mixtral has the same in all)"
    if config.moe_router_topk == 1:
        yield "one expert for each token, weighted by its probability"
    if config.add_bias_linear:
        yield "a mixture of experts with biases in attention"


def _share(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.init_method_std,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _build_gpt2_config(config: GPTConfig) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        **_share(config),
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_attention_heads,
        n_inner=config.ffn_hidden_size,
        n_positions=config.max_position_embeddings,
        layer_norm_epsilon=config.layernorm_epsilon,
        resid_pdrop=config.hidden_dropout,
        embd_pdrop=config.hidden_dropout,
        attn_pdrop=config.attention_dropout,
        architectures=["GPT2LMHeadModel"],
    )


def _describe_llama(config: GPTConfig) -> dict[str, Any]:
    return {
        **_share(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.layernorm_epsilon,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
    }


def _build_llama_config(config: GPTConfig) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **_describe_llama(config),
        attention_bias=config.add_bias_linear,
        mlp_bias=config.add_bias_linear,
        architectures=["LlamaForCausalLM"],
    )


def _build_mixtral_config(config: GPTConfig) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **_describe_llama(config),
        num_local_experts=max(config.experts_per_layer),
        num_experts_per_tok=config.moe_router_topk,
        router_aux_loss_coef=config.moe_loss_coeff,
        architectures=["MixtralForCausalLM"],
    )


_CONFIGS: dict[str, Callable[[GPTConfig], Any]] = {
    "gpt2": _build_gpt2_config,
    "llama": _build_llama_config,
    "mixtral": _build_mixtral_config,
}


def _convert_gpt2_layer(number: int, layer: Weights) -> Weights:
    """GPT-2 keeps its matrices the other way round, and joins query, key and value."""
    found: Weights = {}

    def put(theirs: str, weight: Tensor, bias: Tensor | None) -> None:
        found[f"transformer.h.{number}.{theirs}.weight"] = weight.t().contiguous()
        # A model without biases is one whose biases are zero.
        zeros = torch.zeros(weight.shape[0], dtype=weight.dtype)
        found[f"transformer.h.{number}.{theirs}.bias"] = zeros if bias is None else bias

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
            found[f"transformer.h.{number}.{theirs}.{kind}"] = layer[f"{ours}.{kind}"]
    return found


_LLAMA_NAMES = {
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj", "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj", "feed_forward.router": "mlp.gate",
}  # fmt: skip


def _convert_llama_layer(number: int, layer: Weights) -> Weights:
    """The same matrices by other names; a mixture's experts are joined and turned."""
    prefix, found = f"model.layers.{number}.", {}
    for name, weight in layer.items():
        module, _, kind = name.rpartition(".")
        if module in _LLAMA_NAMES:
            found[f"{prefix}{_LLAMA_NAMES[module]}.{kind}"] = weight
    if "feed_forward.experts.up" in layer:
        experts = {part: layer[f"feed_forward.experts.{part}"] for part in ("gate", "up", "down")}
        joined = torch.cat([experts["gate"], experts["up"]], dim=-1)
        found[f"{prefix}mlp.experts.gate_up_proj"] = joined.transpose(1, 2).contiguous()
        found[f"{prefix}mlp.experts.down_proj"] = experts["down"].transpose(1, 2).contiguous()
    return found
