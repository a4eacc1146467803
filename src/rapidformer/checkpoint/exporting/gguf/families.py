"""What a GGUF file says of a model, and how its tensors differ from those of transformers.

llama.cpp computes each architecture in one way only. Whatever it cannot be told (another
activation, another scale of the attention) is refused here: it would silently compute something
else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapidformer.errors import ModelError

Metadata = dict[str, Any]
"""Keys of the file with their values; those of an architecture begin with its name."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


@dataclass(frozen=True)
class Family:
    """How one type of model is written."""

    architecture: str
    """llama.cpp's name."""
    describe: Callable[[Any], Metadata]
    """The keys of the architecture, without its name; refuses what llama.cpp does not compute."""
    change: Callable[[Any, str, Tensor], Tensor]
    """A tensor of transformers, by its name there, as llama.cpp wants it."""


def find_family(config: Any) -> Family:
    """How to write a model with this configuration."""
    family = _FAMILIES.get(config.model_type)
    architectures = config.architectures or [""]
    if family is None or not architectures[0].endswith(("ForCausalLM", "LMHeadModel")):
        known = ", ".join(_FAMILIES)
        raise ModelError(
            f"GGUF: {architectures[0] or 'a model'} of type {config.model_type} cannot be written; "
            f"causal language models of these types can: {known}."
        )
    return family


def adapt_config(config: Any) -> Any:
    """The configuration with which transformers reads the file: there, Mistral's is a Llama's."""
    if config.model_type != "mistral":
        return copy.deepcopy(config)
    from transformers import LlamaConfig

    fields = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    fields["max_position_embeddings"] = _get_length(config)
    for name in ("model_type", "sliding_window"):
        fields.pop(name, None)
    return LlamaConfig(**fields)


def compute_rope_factors(config: Any) -> Tensor | None:
    """What each frequency is divided by, for the one scaling that is stored as a tensor."""
    if config.model_type not in ("llama", "mistral"):
        return None
    rope = _get_rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    frequencies = rope["rope_theta"] ** -(torch.arange(0, _get_head(config), 2) / _get_head(config))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


# ---- the families --------------------------------------------------------------------------------


def _describe_llama(config: Any) -> Metadata:
    _require(config.hidden_act == "silu", f"hidden_act {config.hidden_act}; it knows silu alone")
    return {
        **_describe_rotary(config), "context_length": _get_length(config),
        "rope.dimension_count": _get_head(config),
    }  # fmt: skip


def _describe_qwen(config: Any) -> Metadata:
    _require(config.hidden_act == "silu", f"hidden_act {config.hidden_act}; it knows silu alone")
    kinds = set(config.layer_types or ())
    _require(kinds <= {"full_attention"}, f"layers with {', '.join(sorted(kinds))}")
    _require(
        config.model_type != "qwen3" or not config.attention_bias, "attention_bias in a Qwen3 model"
    )
    return _describe_rotary(config)


def _describe_gemma(config: Any) -> Metadata:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    _require(activation in _TANH_GELU, f"hidden_activation {activation}; it knows GELU by tanh")
    _require(
        not getattr(config, "attention_bias", False) and config.tie_word_embeddings,
        "a Gemma model with attention_bias or without tied embeddings",
    )
    keys = _describe_rotary(config)
    if config.model_type == "gemma":
        return keys
    scale = config.hidden_size // config.num_attention_heads
    scale = scale if config.num_hidden_layers in (46, 62) else _get_head(config)  # of 27B, or not
    given = config.query_pre_attn_scalar
    _require(given == scale, f"query_pre_attn_scalar {given}; it takes {scale} for this model")
    types = list(config.layer_types)
    period = types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
    repeated = [
        "sliding_attention" if i % period < period - 1 else "full_attention"
        for i in range(len(types))
    ]
    _require(types == repeated, "an irregular pattern of sliding layers")
    keys |= {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": period,
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            keys[name] = float(getattr(config, name))
    return keys


def _describe_gpt2(config: Any) -> Metadata:
    activation = config.activation_function
    _require(activation in _TANH_GELU, f"activation {activation}; it knows GELU by tanh")
    _require(
        config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx,
        "attention that is not scaled by the size of a head",
    )
    return {
        "block_count": config.n_layer, "context_length": config.n_positions,
        "embedding_length": config.n_embd, "attention.head_count": config.n_head,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
    }  # fmt: skip


def _describe_rotary(config: Any) -> Metadata:
    """What all models with rotary positions have."""
    keys: Metadata = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": _get_head(config), "attention.value_length": _get_head(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    rope = _get_rope(config)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    local = config.rope_parameters.get("sliding_attention")
    if local is not None:
        _require(local.get("rope_type", "default") == "default", "scaled sliding positions")
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    else:
        scaled = kind == "llama3" and config.model_type in ("llama", "mistral")
        _require(kind == "default" or scaled, f"rope_type {kind} in a {config.model_type} model")
    return keys


def _interleave(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Llama's heads: llama.cpp rotates neighbours, transformers the two halves of a head."""
    if ".q_proj." in name:
        heads = config.num_attention_heads
    elif ".k_proj." in name:
        heads = config.num_key_value_heads
    else:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_one(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Gemma's norms: transformers adds the 1, llama.cpp multiplies by what is stored."""
    return tensor + 1 if name.endswith("norm.weight") else tensor


def _transpose(config: Any, name: str, tensor: Tensor) -> Tensor:
    """GPT-2's layers: transformers stores them as (inputs, outputs)."""
    names = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return tensor.T if name.endswith(names) else tensor


def _keep(config: Any, name: str, tensor: Tensor) -> Tensor:
    return tensor


def _get_head(config: Any) -> int:
    head: int | None = getattr(config, "head_dim", None)
    return head or config.hidden_size // config.num_attention_heads


def _get_length(config: Any) -> int:
    """Mistral's sliding window ends the context: the file has no word for it, and shorter texts
    do not reach it."""
    window = getattr(config, "sliding_window", None)
    return int(min(config.max_position_embeddings, window or config.max_position_embeddings))


def _get_rope(config: Any) -> dict[str, Any]:
    """Of a model with sliding layers, that of the others."""
    every: dict[str, Any] = config.rope_parameters
    return every.get("full_attention", every)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ModelError(f"GGUF: llama.cpp has no equivalent of {what}. Nothing was exported.")


_FAMILIES = {
    "llama": Family("llama", _describe_llama, _interleave),
    "mistral": Family("llama", _describe_llama, _interleave),
    "qwen2": Family("qwen2", _describe_qwen, _keep),
    "qwen3": Family("qwen3", _describe_qwen, _keep),
    "gemma": Family("gemma", _describe_gemma, _add_one),
    "gemma2": Family("gemma2", _describe_gemma, _add_one),
    "gemma3_text": Family("gemma3", _describe_gemma, _add_one),
    "gpt2": Family("gpt2", _describe_gpt2, _transpose),
}
