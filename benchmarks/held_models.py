"""The models of ``held.py``: sizes as published, and rows whose lengths vary as in real data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import own_models
import transformers
from workloads import Rows, Workload

TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96,
}  # fmt: skip
UNITS = {"images": "images", "speech": "recordings", "sound": "recordings"}
TINY_SIDES: dict[str, Any] = {
    "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Held:
    """One model: its classes by name, its size, and the data."""

    config: str
    """Empty for a model of ``own_models.py``."""
    model: str
    batch: int
    lengths: tuple[int, int]
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    kind: str = "labels"
    """What is learnt: ``labels`` of rows, ``tags`` of tokens, ``text``, ``answers`` alone,
    ``pairs``, ``images``, ``speech`` or labels of ``sound``."""

    def build_workload(self, size: str) -> Workload:
        is_tiny = size == "tiny"
        lengths = tuple(max(4, length // 8) for length in self.lengths) if is_tiny else self.lengths
        batch = min(self.batch, 8) if is_tiny else self.batch
        sizes = {**self.sizes, **self.tiny} if is_tiny else self.sizes

        def build() -> Any:
            if not self.config:
                return getattr(own_models, self.model)(**sizes)
            config = getattr(transformers, self.config)(**sizes)
            return getattr(transformers, self.model)(config)

        def make_rows(count: int) -> Any:
            if self.kind in UNITS:
                return Signals(count, self.kind, lengths, is_tiny)
            words = sizes.get("vocab_size") or build().config.vocab_size
            return make_skewed_rows(count, self.kind, lengths, words)

        unit = UNITS.get(self.kind, "tokens")
        return Workload(build=build, make_rows=make_rows, batch=batch, unit=unit)


HELD = {
    "DistilBERT": Held(
        "DistilBertConfig", "DistilBertForSequenceClassification", 16, (10, 60),
        {"vocab_size": 30522}, {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    ),
    "BART-large": Held(
        "BartConfig", "BartForConditionalGeneration", 16, (40, 400), {"vocab_size": 50265},
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
         "decoder_ffn_dim": 96, "vocab_size": 512}, "pairs",
    ),
    "ModernBERT-base": Held(
        "ModernBertConfig", "ModernBertForSequenceClassification", 32, (20, 500),
        {"vocab_size": 50368}, {**TINY, "pad_token_id": 0},
    ),
    "ELECTRA-base": Held(
        "ElectraConfig", "ElectraForSequenceClassification", 32, (10, 120),
        {"vocab_size": 30522, "embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12,
         "intermediate_size": 3072}, TINY,
    ),
    "RoBERTa-large": Held(
        "RobertaConfig", "RobertaForSequenceClassification", 32, (10, 120),
        {"vocab_size": 50265, "hidden_size": 1024, "num_hidden_layers": 24,
         "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 514},
        TINY,
    ),
    "Qwen3 0.6B": Held(
        "Qwen3Config", "Qwen3ForCausalLM", 8, (50, 1500),
        {"vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
         "tie_word_embeddings": True}, {**TINY, "num_key_value_heads": 2, "head_dim": 16},
        "answers",
    ),
    "OLMoE shape": Held(
        "OlmoeConfig", "OlmoeForCausalLM", 8, (50, 1000),
        {"vocab_size": 50304, "num_hidden_layers": 8, "num_experts": 32, "intermediate_size": 1024},
        {**TINY, "num_experts": 4, "num_experts_per_tok": 2}, "text",
    ),
    "Gemma 3 1B": Held(
        "Gemma3TextConfig", "Gemma3ForCausalLM", 4, (50, 1500),
        {"vocab_size": 262144, "hidden_size": 1152, "num_hidden_layers": 26,
         "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 6912,
         "sliding_window": 512},
        {**TINY, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 32}, "text",
    ),
    "ViT-base": Held(
        "ViTConfig", "ViTForImageClassification", 64, (1, 1), {"num_labels": 2},
        {**TINY, "image_size": 32}, "images",
    ),
    "DeBERTa-v3 base": Held(
        "DebertaV2Config", "DebertaV2ForSequenceClassification", 32, (10, 120),
        {"vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "intermediate_size": 3072, "relative_attention": True,
         "position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
         "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0},
        TINY,
    ),
    "mT5-base": Held(
        "MT5Config", "MT5ForConditionalGeneration", 16, (40, 400),
        {"vocab_size": 250112, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12,
         "d_kv": 64, "decoder_start_token_id": 0}, TINY_SIDES, "pairs",
    ),
    # The second set, tried after the first one had been made fast.
    "ALBERT-base": Held(
        "AlbertConfig", "AlbertForSequenceClassification", 32, (10, 120),
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        {**TINY, "embedding_size": 32},
    ),
    "XLM-R-base, tags": Held(
        "XLMRobertaConfig", "XLMRobertaForTokenClassification", 32, (10, 120),
        {"vocab_size": 250002, "max_position_embeddings": 514}, TINY, "tags",
    ),
    "XLNet-base": Held(
        "XLNetConfig", "XLNetForSequenceClassification", 16, (20, 200),
        {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072},
        {"vocab_size": 512, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
    ),
    "Longformer-base": Held(
        "LongformerConfig", "LongformerForSequenceClassification", 8, (50, 2000),
        {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1},
        {**TINY, "attention_window": 16},
    ),
    "OPT-350m shape": Held(
        "OPTConfig", "OPTForCausalLM", 8, (50, 1000),
        {"vocab_size": 50272, "hidden_size": 1024, "num_hidden_layers": 24,
         "num_attention_heads": 16, "ffn_dim": 4096},
        {**TINY, "ffn_dim": 96, "word_embed_proj_dim": 64}, "text",
    ),
    "Pythia-410m": Held(
        "GPTNeoXConfig", "GPTNeoXForCausalLM", 8, (50, 1000),
        {"vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 24,
         "num_attention_heads": 16, "intermediate_size": 4096}, TINY, "text",
    ),
    "Phi-3 shape, 1B": Held(
        "Phi3Config", "Phi3ForCausalLM", 8, (50, 1500),
        {"vocab_size": 32064, "hidden_size": 2048, "num_hidden_layers": 20,
         "num_attention_heads": 32, "intermediate_size": 5632, "pad_token_id": 0},
        {**TINY, "num_key_value_heads": 4, "pad_token_id": 0}, "answers",
    ),
    "Mixtral shape": Held(
        "MixtralConfig", "MixtralForCausalLM", 8, (50, 1000),
        {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 12,
         "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816},
        {**TINY, "num_key_value_heads": 2, "num_local_experts": 4}, "text",
    ),
    "Mamba-130m": Held(
        "MambaConfig", "MambaForCausalLM", 8, (50, 1000),
        {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24},
        {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}, "text",
    ),
    "Marian (opus-mt)": Held(
        "MarianConfig", "MarianMTModel", 32, (10, 100),
        {"vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
         "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
         "decoder_ffn_dim": 2048, "pad_token_id": 0, "decoder_start_token_id": 0},
        {"vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}, "pairs",
    ),
    "T5-small": Held(
        "T5Config", "T5ForConditionalGeneration", 32, (20, 200),
        {"vocab_size": 32128, "decoder_start_token_id": 0}, TINY_SIDES, "pairs",
    ),
    "Whisper-small": Held(
        "WhisperConfig", "WhisperForConditionalGeneration", 16, (5, 60),
        {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
         "max_source_positions": 100}, "speech",
    ),
    "Swin-tiny": Held(
        "SwinConfig", "SwinForImageClassification", 64, (1, 1), {"num_labels": 2},
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
         "window_size": 4}, "images",
    ),
    "DINOv2-base": Held(
        "Dinov2Config", "Dinov2ForImageClassification", 64, (1, 1),
        {"num_labels": 2, "image_size": 224, "patch_size": 14},
        {**TINY, "image_size": 32, "patch_size": 16}, "images",
    ),
    # The third set.
    "MPNet-base": Held(
        "MPNetConfig", "MPNetForSequenceClassification", 32, (10, 120), {"vocab_size": 30527}, TINY,
    ),
    "Bloom-560m": Held(
        "BloomConfig", "BloomForCausalLM", 8, (50, 1000),
        {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16, "pad_token_id": 3},
        {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "text",
    ),
    "GPT-Neo-125m": Held(
        "GPTNeoConfig", "GPTNeoForCausalLM", 8, (50, 1000),
        {"vocab_size": 50257, "hidden_size": 768, "num_layers": 12, "num_heads": 12,
         "attention_types": [[["global", "local"], 6]]},
        {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
         "attention_types": [[["global", "local"], 1]]}, "text",
    ),
    "GPT-2 medium": Held(
        "GPT2Config", "GPT2LMHeadModel", 8, (50, 1000),
        {"vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16},
        {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}, "text",
    ),
    "CodeGen-350m": Held(
        "CodeGenConfig", "CodeGenForCausalLM", 8, (50, 1000),
        {"vocab_size": 51200, "n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32},
        {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "text",
    ),
    "Qwen2.5 0.5B": Held(
        "Qwen2Config", "Qwen2ForCausalLM", 8, (50, 1000),
        {"vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
         "tie_word_embeddings": True}, {**TINY, "num_key_value_heads": 2}, "answers",
    ),
    "ESM-2 150M, tags": Held(
        "EsmConfig", "EsmForTokenClassification", 16, (50, 500),
        {"vocab_size": 33, "hidden_size": 640, "num_hidden_layers": 30, "num_attention_heads": 20,
         "intermediate_size": 2560, "position_embedding_type": "rotary", "token_dropout": True,
         "pad_token_id": 1, "mask_token_id": 32}, {**TINY, "vocab_size": 33}, "tags",
    ),
    "M2M100-418M": Held(
        "M2M100Config", "M2M100ForConditionalGeneration", 32, (10, 100), {"vocab_size": 128112},
        {"vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}, "pairs",
    ),
    "ConvNeXt-tiny": Held(
        "ConvNextConfig", "ConvNextForImageClassification", 64, (1, 1), {"num_labels": 2},
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}, "images",
    ),
    "BEiT-base": Held(
        "BeitConfig", "BeitForImageClassification", 64, (1, 1), {"num_labels": 2},
        {**TINY, "image_size": 32}, "images",
    ),
    "Wav2Vec2-base": Held(
        "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", 16, (1, 1), {"num_labels": 2},
        TINY, "sound",
    ),
    # The fourth set.
    "SmolLM2-360M": Held(
        "LlamaConfig", "LlamaForCausalLM", 8, (50, 1000),
        {"vocab_size": 49152, "hidden_size": 960, "num_hidden_layers": 32,
         "num_attention_heads": 15, "num_key_value_heads": 5, "intermediate_size": 2560,
         "tie_word_embeddings": True}, {**TINY, "num_key_value_heads": 2}, "text",
    ),
    "Gemma 2 shape": Held(
        "Gemma2Config", "Gemma2ForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 16,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
         "intermediate_size": 4096, "sliding_window": 512},
        {**TINY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32}, "text",
    ),
    "gpt-oss shape": Held(
        "GptOssConfig", "GptOssForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
         "intermediate_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 4},
        {**TINY, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
         "num_experts_per_tok": 2}, "text",
    ),
    "DeepSeek-V3 shape": Held(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 2816,
         "moe_intermediate_size": 512, "n_routed_experts": 32, "num_experts_per_tok": 4,
         "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 384,
         "kv_lora_rank": 256},
        {**TINY, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        "text",
    ),
    "LFM2-350M": Held(
        "Lfm2Config", "Lfm2ForCausalLM", 8, (50, 1000),
        {"vocab_size": 65536, "hidden_size": 1024, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 6656,
         "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        {**TINY, "num_key_value_heads": 2, "full_attn_idxs": [1]}, "text",
    ),
    "mBART-large": Held(
        "MBartConfig", "MBartForConditionalGeneration", 16, (20, 200), {"vocab_size": 250027},
        {"vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}, "pairs",
    ),
    "CLIP ViT-B/16": Held(
        "CLIPConfig", "CLIPForImageClassification", 64, (1, 1),
        {"vision_config": {"patch_size": 16}, "num_labels": 2},
        {"vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "image_size": 32, "patch_size": 8}}, "images",
    ),
    "ResNet-50": Held(
        "ResNetConfig", "ResNetForImageClassification", 64, (1, 1), {"num_labels": 2},
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}, "images",
    ),
    "HuBERT-base": Held(
        "HubertConfig", "HubertForSequenceClassification", 16, (1, 1), {"num_labels": 2},
        TINY, "sound",
    ),
    # The fifth set: mostly decoders of these years, half of them without attention in most blocks.
    "Qwen3.5 shape": Held(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 12,
         "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 3584,
         "linear_num_value_heads": 16, "tie_word_embeddings": True},
        {**TINY, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "layer_types": ["linear_attention", "full_attention"]}, "text",
    ),
    "Granite 4 hybrid shape": Held(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 2048,
         "num_local_experts": 0, "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128,
         "layer_types": [*["mamba"] * 5, "attention"] * 2, "max_position_embeddings": 8192},
        {**TINY, "num_hidden_layers": 2, "num_key_value_heads": 2, "shared_intermediate_size": 96,
         "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16,
         "layer_types": ["mamba", "attention"]}, "text",
    ),
    "Falcon-H1 shape": Held(
        "FalconH1Config", "FalconH1ForCausalLM", 8, (50, 1000),
        {"vocab_size": 32784, "hidden_size": 1024, "num_hidden_layers": 12,
         "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2048,
         "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
        {**TINY, "num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4,
         "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}, "text",
    ),
    "Mamba2-130m": Held(
        "Mamba2Config", "Mamba2ForCausalLM", 8, (50, 1000),
        {"vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24,
         "n_groups": 1, "tie_word_embeddings": True},
        {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4,
         "head_dim": 32, "state_size": 16, "chunk_size": 16}, "text",
    ),
    "Gemma 4 shape": Held(
        "Gemma4TextConfig", "Gemma4ForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 12,
         "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 4096,
         "vocab_size_per_layer_input": 64000, "hidden_size_per_layer_input": 128},
        {**TINY, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 32,
         "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16,
         "layer_types": ["sliding_attention", "full_attention"]}, "text",
    ),
    "Olmo 3 shape": Held(
        "Olmo3Config", "Olmo3ForCausalLM", 8, (50, 1000),
        {"vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 16,
         "num_attention_heads": 16, "intermediate_size": 4096, "sliding_window": 512},
        {**TINY, "sliding_window": 32, "eos_token_id": 2}, "text",
    ),
    "GLM-4.5 shape": Held(
        "Glm4MoeConfig", "Glm4MoeForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816,
         "moe_intermediate_size": 512, "n_routed_experts": 32, "num_experts_per_tok": 4,
         "use_qk_norm": True},
        {**TINY, "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 4,
         "num_experts_per_tok": 2}, "text",
    ),
    "Qwen3-MoE shape": Held(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "moe_intermediate_size": 512,
         "num_experts": 32, "num_experts_per_tok": 4},
        {**TINY, "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 4,
         "num_experts_per_tok": 2}, "text",
    ),
    "EuroBERT-210m": Held(
        "EuroBertConfig", "EuroBertForSequenceClassification", 32, (20, 500),
        {"pad_token_id": 0}, TINY,
    ),
    "SigLIP-base": Held(
        "SiglipConfig", "SiglipForImageClassification", 64, (1, 1), {"num_labels": 2},
        {"vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "image_size": 32, "patch_size": 8}}, "images",
    ),
    "StarCoder2 shape": Held(
        "Starcoder2Config", "Starcoder2ForCausalLM", 8, (50, 1000),
        {"vocab_size": 49152, "hidden_size": 1024, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 4096},
        {**TINY, "num_key_value_heads": 2}, "text",
    ),
    "Cohere 2 shape": Held(
        "Cohere2Config", "Cohere2ForCausalLM", 8, (50, 1000),
        {"vocab_size": 64000, "hidden_size": 1024, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096,
         "sliding_window": 512},
        {**TINY, "num_key_value_heads": 2, "sliding_window": 32}, "text",
    ),
    "Phi-MoE shape": Held(
        "PhimoeConfig", "PhimoeForCausalLM", 8, (50, 1000),
        {"vocab_size": 32064, "hidden_size": 1024, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 1024,
         "num_local_experts": 16},
        {**TINY, "num_key_value_heads": 2, "num_local_experts": 4}, "text",
    ),
    "Pegasus-large": Held(
        "PegasusConfig", "PegasusForConditionalGeneration", 16, (40, 400),
        {"vocab_size": 96103, "d_model": 1024, "encoder_layers": 16, "decoder_layers": 16},
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
         "decoder_ffn_dim": 96, "vocab_size": 512}, "pairs",
    ),
    "LED-base": Held(
        "LEDConfig", "LEDForConditionalGeneration", 8, (50, 1000),
        {"vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
         "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12},
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
         "decoder_ffn_dim": 96, "vocab_size": 512, "attention_window": 16,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4}, "pairs",
    ),
    "FNet-base": Held(
        "FNetConfig", "FNetForSequenceClassification", 32, (10, 120), {"vocab_size": 32000}, TINY,
    ),
    "MobileBERT": Held(
        "MobileBertConfig", "MobileBertForSequenceClassification", 32, (10, 120),
        {"vocab_size": 30522}, {"num_hidden_layers": 2, "vocab_size": 512},
    ),
    "BigBird-base": Held(
        "BigBirdConfig", "BigBirdForSequenceClassification", 8, (50, 2000),
        {"vocab_size": 50358}, TINY,
    ),
    "SegFormer-b2": Held(
        "SegformerConfig", "SegformerForImageClassification", 64, (1, 1),
        {"num_labels": 2, "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512]},
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}, "images",
    ),
    "PVTv2-b2": Held(
        "PvtV2Config", "PvtV2ForImageClassification", 64, (1, 1),
        {"num_labels": 2, "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512]},
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 40, 64], "image_size": 32}, "images",
    ),
    "Data2Vec-audio": Held(
        "Data2VecAudioConfig", "Data2VecAudioForSequenceClassification", 16, (1, 1),
        {"num_labels": 2}, {**TINY, "num_conv_pos_embeddings": 2}, "sound",
    ),
    "nanoGPT": Held(
        "", "NanoGPT", 8, (50, 1000), {"vocab_size": 50257},
        TINY, "text",
    ),
    "a classifier around BERT": Held(
        "", "AroundBert", 32, (10, 120), {"vocab_size": 30522}, TINY,
    ),
    "nn.TransformerEncoder": Held(
        "", "Classifier", 32, (10, 120), {"vocab_size": 30522}, TINY,
    ),
}  # fmt: skip


class Signals:
    """Images, sound, or the spectra of speech with what is said; a few, which come again."""

    def __init__(self, count: int, kind: str, lengths: tuple[int, int], is_tiny: bool) -> None:
        random = np.random.default_rng(0)
        side = 32 if is_tiny else 224
        shape = {
            "images": (3, side, side),
            "speech": (80, 200 if is_tiny else 3000),
            "sound": (4000 if is_tiny else 80000,),
        }[kind]
        self._column = "input_values" if kind == "sound" else "pixel_values"
        self._signals = random.standard_normal((128, *shape), dtype=np.float32)
        self._spoken = make_skewed_rows(128, "text", lengths, 500) if kind == "speech" else []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        place = number % len(self._signals)
        if self._spoken:
            labels = self._spoken[place]["labels"]
            return {"input_features": self._signals[place], "labels": labels}
        return {self._column: self._signals[place], "labels": place % 2}


def make_skewed_rows(count: int, kind: str, lengths: tuple[int, ...], words: int) -> Rows:
    """Rows whose lengths are mostly short; tokens follow each other, so that the loss can fall."""
    random = np.random.default_rng(0)

    def write(label: int = 0) -> list[int]:
        length = round(lengths[0] + (lengths[1] - lengths[0]) * random.random() ** 3)
        half = (words - 10) // 2
        ids: list[int] = (random.integers(10, 10 + half, length) + half * label).tolist()
        return ids

    rows = []
    for _ in range(count):
        if kind == "labels":
            label = int(random.integers(0, 2))
            rows.append({"input_ids": write(label), "labels": label})
        elif kind == "tags":
            ids = write()
            rows.append({"input_ids": ids, "labels": [token % 2 for token in ids]})
        elif kind == "pairs":
            rows.append({"input_ids": write(), "labels": write()})
        else:
            ids = write()
            asked = len(ids) * 3 // 4 if kind == "answers" else 0
            rows.append({"input_ids": ids, "labels": [-100] * asked + ids[asked:]})
    return rows
