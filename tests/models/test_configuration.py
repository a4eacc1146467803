from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import Gemma4TextConfig

from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.models.configuration import get_position_limit, load_config

from .conftest import make_args


def test_load_comes_first_where_it_is_a_model_folder(folder: Path, tmp_path: Path) -> None:
    args = make_args(load=str(folder), pretrained_model_name_or_path="no-such-model")
    assert load_config(args).hidden_size == 16
    args = make_args(load=str(tmp_path), pretrained_model_name_or_path=str(folder))
    assert load_config(args).num_labels == 3


def test_positions_of_roberta() -> None:
    config = load_config(make_args(model_type="roberta", seq_length=600))
    assert get_position_limit(config) == 600 and config.max_position_embeddings == 602


def test_contradicting_sizes_are_all_reported(folder: Path) -> None:
    args = make_args(
        pretrained_model_name_or_path=str(folder), num_layers=4, hidden_size=32, model_type="gpt2"
    )
    with pytest.raises(ConfigurationError) as caught:
        load_config(args)
    text = str(caught.value)
    assert "3 problems" in text
    assert "--num-layers 4 contradicts" in text and "which has 2" in text
    assert "--hidden-size 32 contradicts" in text and "which has 16" in text
    assert "--model-type gpt2 contradicts" in text


def test_remote_code_is_refused_unless_asked_for(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "own")
    path = tmp_path / "own" / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"},
    }  # fmt: skip
    path.write_text(json.dumps(config))
    (tmp_path / "own" / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"add --trust-remote-code if you trust it"):
        load_config(make_args(pretrained_model_name_or_path=str(tmp_path / "own")))


def test_blocks_with_heads_of_different_sizes(tmp_path: Path) -> None:
    """transformers refuses to name one size for all of them."""
    Gemma4TextConfig(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, head_dim=16, global_head_dim=32,
        num_key_value_heads=2, num_global_key_value_heads=1, attention_k_eq_v=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    location = {"pretrained_model_name_or_path": str(tmp_path), "from_scratch": True}
    config = load_config(make_args(**location, hidden_size=32, num_attention_heads=4))
    assert config.hidden_size == 32
    assert [block.head_dim for block in config.per_layer_config] == [16] * 5 + [32]
    assert [block.num_key_value_heads for block in config.per_layer_config] == [2] * 5 + [1]
