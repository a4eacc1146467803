"""The settings that models are built from, and a small model folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_TEXT = """
pretrained_model_name_or_path load model_type num_layers hidden_size num_attention_heads
ffn_hidden_size max_position_embeddings vocab_size image_size patch_size hidden_dropout
attention_dropout init_method_std cache_dir tokenizer_type vocab_file merge_file seq_length
lora_rank peft_config quantize_base allow_partial_load
"""
_NAMES = _TEXT.split()
SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}


def make_args(**values: Any) -> SimpleNamespace:
    defaults = dict.fromkeys(_NAMES) | {
        "trust_remote_code": False, "from_scratch": False, "train_vision": False,
        "train_projector": False,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, "world_size": 1, **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    target = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=40, num_labels=3,
    )  # fmt: skip
    BertForSequenceClassification(config).half().save_pretrained(target)
    return target
