"""Models that see, tiny, from the configurations of their families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMultimodalLM

IMAGE = 60
"""The token that stands for a piece of an image."""
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def _text(kind: str, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "vocab_size": 68, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, **more,
    }  # fmt: skip


def _tower(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, **more,
    }  # fmt: skip


def _take_turns(first: str, layers: int) -> list[str]:
    return [(first, "full_attention")[i % 2] for i in range(layers)]


def _qwen(kind: str, layers: int, **more: Any) -> dict[str, Any]:
    tower = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return {
        "text_config": _text(f"{kind}_text", layers, rope_parameters=_ROPE, **more),
        "vision_config": tower, "image_token_id": IMAGE, "video_token_id": IMAGE + 1,
        "vision_start_token_id": IMAGE + 2, "vision_end_token_id": IMAGE + 3,
        "tie_word_embeddings": True,
    }  # fmt: skip


SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen3_vl": lambda n: _qwen("qwen3_vl", n),
    # AutoModelForCausalLM would leave out its tower; one of its kinds of blocks has no attention.
    "qwen3_5": lambda n: _qwen(
        "qwen3_5", n, layer_types=_take_turns("linear_attention", n), linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    "gemma3": lambda n: {
        "text_config": _text(
            "gemma3_text", n, sliding_window=8, layer_types=_take_turns("sliding_attention", n)
        ),
        "vision_config": _tower("siglip_vision_model"), "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
    "smolvlm": lambda n: {
        "text_config": _text("llama", n), "vision_config": _tower("smolvlm_vision"),
        "scale_factor": 2, "image_token_id": IMAGE, "pad_token_id": 0,
    },
    "llava": lambda n: {
        "text_config": _text("llama", n), "vision_config": _tower("clip_vision_model"),
        "image_token_index": IMAGE,
    },
    "mistral3": lambda n: {
        "text_config": _text("mistral", n), "vision_config": _tower("pixtral", head_dim=8),
        "image_token_index": IMAGE, "spatial_merge_size": 1,
    },
    # Its language model has blocks that only images reach.
    "mllama": lambda n: {
        "text_config": _text("mllama_text_model", n, cross_attention_layers=[1]),
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_global_layers": 1, "attention_heads": 2, "image_size": 8, "patch_size": 4,
            "vision_output_dim": 32, "intermediate_layers_indices": [0], "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
        "image_token_index": IMAGE,
    },
    "llama4": lambda n: {
        "text_config": _text(
            "llama4_text", n, intermediate_size_mlp=32, num_local_experts=2, num_experts_per_tok=1,
            attention_chunk_size=32, no_rope_layers=[1, 0] * (n // 2),
        ),
        "vision_config": _tower(
            "llama4_vision_model", vision_output_dim=16, projector_input_dim=16,
            projector_output_dim=16,
        ),
        "image_token_index": IMAGE,
    },
    "voxtral": lambda n: {
        "text_config": _text("llama", n),
        "audio_config": {
            "model_type": "voxtral_encoder", "num_mel_bins": 8, "hidden_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
            "max_source_positions": 8,
        },
        "audio_token_id": IMAGE,
    },
}  # fmt: skip


def build_images(kind: str) -> dict[str, torch.Tensor]:
    """A row with an image, as the family's processor would make it."""
    count = 1 if kind in ("smolvlm", "qwen3_vl", "qwen3_5") else 4
    ids = torch.tensor([[5, *[IMAGE] * count, 7, 8, 9]])
    generator = torch.Generator().manual_seed(0)
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind.startswith("qwen"):
        row["mm_token_type_ids"] = (ids == IMAGE).long()
        row["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        return {**row, "pixel_values": torch.rand(4, 96, generator=generator)}
    if kind == "mistral3":
        row["image_sizes"] = torch.tensor([[8, 8]])
    shape = (1, 1, 3, 8, 8) if kind == "smolvlm" else (1, 3, 8, 8)
    return {**row, "pixel_values": torch.rand(shape, generator=generator)}


def build_seeing(kind: str, layers: int = 2) -> nn.Module:
    """As it was made: nothing is frozen."""
    model: nn.Module = AutoModelForMultimodalLM.from_config(
        AutoConfig.for_model(kind, **SETTINGS[kind](layers))
    )
    return model
