"""Adapters by their name on the Hub: in a local cache like the one that a download leaves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer.cli.run_model import choose_run_model
from rapidformer.config.derive import resolve
from rapidformer.config.parse import parse_arguments
from rapidformer.dialects.huggingface.weights import load_weights
from rapidformer.errors import ConfigurationError
from rapidformer.models.adapter_folder import fetch_adapter
from rapidformer.models.build import build_pretrained
from rapidformer.models.location import get_model_location

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IDS = torch.arange(8)[None]


def build_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def save_adapter(folder: Path, **options: Any) -> None:
    model = build_llama()
    model.name_or_path = "org/base"
    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, config)
    adapted.save_pretrained(folder, **options)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with the model ``org/base`` and its adapter ``org/adapter``; no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("base", "adapter"):
        folder = tmp_path / f"models--org--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
    build_llama().save_pretrained(tmp_path / f"models--org--base/snapshots/{COMMIT}")
    save_adapter(tmp_path / f"models--org--adapter/snapshots/{COMMIT}")
    fetch_adapter.cache_clear()
    yield tmp_path
    fetch_adapter.cache_clear()


def compute_expected(hub: Path) -> torch.Tensor:
    folder = hub / f"models--org--adapter/snapshots/{COMMIT}"
    logits: torch.Tensor = PeftModel.from_pretrained(build_llama(), folder)(IDS).logits
    return logits


def test_predict_loads_an_adapter_and_its_base_model_by_name(hub: Path) -> None:
    args = choose_run_model(parse_arguments(["--load", "org/adapter"]), "predict")
    assert args.task == "causal_lm"
    model: Any = build_pretrained("AutoModelForCausalLM", args)
    assert torch.equal(model(IDS).logits, compute_expected(hub))
    assert not torch.equal(model(IDS).logits, build_llama()(IDS).logits)


def test_training_continues_an_adapter_by_name(hub: Path) -> None:
    words = ["--task", "causal_lm", "--data-path", str(hub), "--load"]
    args = resolve(parse_arguments([*words, "org/adapter"]))
    assert get_model_location(args) == str(hub / f"models--org--adapter/snapshots/{COMMIT}")
    model = build_pretrained("AutoModelForCausalLM", args)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    with pytest.raises(ConfigurationError, match=r"--load adapter: no such folder"):
        resolve(parse_arguments([*words, "adapter"]))


def test_a_name_gives_its_weights_to_an_existing_model(hub: Path) -> None:
    model = build_llama()
    load_weights(model, Path("org/adapter"), best=False)
    assert torch.equal(model(IDS).logits, compute_expected(hub))


def test_models_and_unknown_names_are_not_adapters(hub: Path) -> None:
    assert hub.is_dir()
    assert fetch_adapter("org/base", None) is None
    assert fetch_adapter("org/unknown", None) is None
    assert fetch_adapter("./folder", None) is None


def test_an_adapter_that_peft_saved_without_safetensors(hub: Path) -> None:
    expected = compute_expected(hub)
    folder = hub / f"models--org--adapter/snapshots/{COMMIT}"
    shutil.rmtree(folder)
    save_adapter(folder, safe_serialization=False)
    args = resolve(parse_arguments(["--task", "causal_lm", "--load", "org/adapter"]))
    model: Any = build_pretrained("AutoModelForCausalLM", args)
    assert torch.equal(model(IDS).logits, expected)
