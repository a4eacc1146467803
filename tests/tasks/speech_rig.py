"""Tiny models that listen, recordings of tones, and one run of ours recorded step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

RATE = 16_000
WORDS = {"low": 300, "mid": 700, "high": 1500}
"""What a tone of so many hertz is called."""


def make_tones(words: str, seconds: float = 0.12, rate: int = RATE) -> np.ndarray:
    """A tone for each word, with a little silence between them."""
    time = np.arange(round(seconds * rate)) / rate
    silence = np.zeros(round(0.03 * rate), dtype=np.float32)
    parts = [0.5 * np.sin(2 * np.pi * WORDS[word] * time) for word in words.split()]
    return np.concatenate([x for part in parts for x in (part.astype(np.float32), silence)])


def make_rows(count: int, seed: int = 0, rate: int = RATE) -> list[dict[str, Any]]:
    dice = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        text = " ".join(dice.choice(list(WORDS), size=dice.integers(1, 4)))
        samples = make_tones(text, rate=rate)
        # A layer norm of perfect silence would be one of round-off.
        samples = samples + dice.normal(0, 0.05, len(samples)).astype(np.float32)
        rows.append({"audio": {"array": samples, "sampling_rate": rate}, "text": text})
    return rows


def make_ctc_model(folder: Path, kind: str = "wav2vec2", **changes: Any) -> Path:
    """A model with fresh weights and no tokenizer, as of a pretrained encoder."""
    import transformers

    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 12, "pad_token_id": 11, "layerdrop": 0.0,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0, "final_dropout": 0.0, "initializer_range": 0.2,
    }  # fmt: skip
    if kind == "wav2vec2-bert":
        config: Any = transformers.Wav2Vec2BertConfig(
            **sizes, feature_projection_input_dim=160, conformer_conv_dropout=0.0,
            conv_depthwise_kernel_size=3, left_max_position_embeddings=8,
            right_max_position_embeddings=8, **changes,
        )  # fmt: skip
        extractor: Any = transformers.SeamlessM4TFeatureExtractor(
            feature_size=80, num_mel_bins=80, padding_value=1
        )
    else:
        name = {"wav2vec2": "Wav2Vec2Config", "hubert": "HubertConfig"}[kind]
        config = getattr(transformers, name)(**{
            **sizes, "conv_dim": (16, 16), "conv_kernel": (20, 8), "conv_stride": (20, 8),
            "num_feat_extract_layers": 2, "feat_extract_norm": "layer",
            "do_stable_layer_norm": True, "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2, **changes,
        })  # fmt: skip
        extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    torch.manual_seed(0)
    transformers.AutoModelForCTC.from_config(config).save_pretrained(folder)
    extractor.save_pretrained(folder)
    return folder


def make_whisper_tokenizer() -> Any:
    from transformers import WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "."]
    table = {token: number for number, token in enumerate([*letters, "<|endoftext|>"])}
    tokenizer = WhisperTokenizer(vocab=table, merges=[], pad_token="<|endoftext|>")
    names = ["startoftranscript", *LANGUAGES, "translate", "transcribe", "notimestamps"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    return tokenizer


def make_whisper(folder: Path, **changes: Any) -> Path:
    """A multilingual Whisper with fresh weights, which hears 1 s at once."""
    import transformers

    tokenizer = make_whisper_tokenizer()
    ids = tokenizer.get_vocab()
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, num_mel_bins=80, max_source_positions=50, max_target_positions=32,
        pad_token_id=end, bos_token_id=end, eos_token_id=end, decoder_start_token_id=start,
        dropout=0.0, classifier_proj_size=8, init_std=0.2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    facts = {
        "is_multilingual": True, "max_length": 32, "return_timestamps": False,
        "lang_to_id": {token: ids[token] for token in ids if len(token) == 6},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
    }  # fmt: skip
    special = {f"{name}_token_id": end for name in ("pad", "bos", "eos")}
    model.generation_config = transformers.GenerationConfig(
        **facts, **special, decoder_start_token_id=start
    )
    model.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder
