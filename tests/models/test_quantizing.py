"""QLoRA: its settings, and with bitsandbytes a run from training to a merged model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import rapidformer
from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.config import parse_arguments
from rapidformer.config.switches import Situation, get_switch
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ModelError
from rapidformer.log import warn_once
from rapidformer.models.build import build_pretrained
from rapidformer.models.quantizing import forget_quantization, get_quantization

IDS = torch.arange(8)[None]


def save_llama(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_eight_bits_need_a_gpu() -> None:
    args = parse_arguments(["--quantize-base", "8bit", "--lora-rank", "2"])
    row = get_switch("quantized base")
    obstacle = row.find_obstacle(args, Situation(device="cpu"))
    assert obstacle is not None and obstacle.if_asked == "refused"
    refusal = row.refuse(args, obstacle.reason)
    assert refusal.startswith("--quantize-base 8bit: on a CPU, bitsandbytes trains with")
    assert refusal.endswith("cannot save them. Use --quantize-base 4bit.")
    assert row.find_obstacle(args, Situation(device="cuda")) is None


def test_nothing_is_asked_for_without_the_flag() -> None:
    assert get_quantization(SimpleNamespace(quantize_base=None, device="auto")) == {}


def train_quantized(base: Path) -> RapidformerEngine:
    """Two updates of LoRA on 4-bit weights."""
    engine = RapidformerEngine(
        args={
            "task": "causal_lm", "pretrained_model_name_or_path": str(base), "data_path": str(base),
            "lora_rank": 2, "lora_target_modules": ["q_proj", "v_proj"], "quantize_base": "4bit",
            "device": "cpu", "lr": 0.1, "train_iters": 2, "log_level": "warning",
        }
    )  # fmt: skip
    model: Any = build_pretrained("AutoModelForCausalLM", engine.args)
    packed = model.get_parameter("model.layers.0.self_attn.q_proj.base_layer.weight")
    assert packed.dtype == torch.uint8 and packed.numel() == 64 * 64 // 2
    before = packed.detach().clone()
    engine.compose(model)
    model.train()
    losses = []
    for _ in range(2):
        loss = model(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        engine.backward(loss, weight=7)
        engine.step()
    assert losses[1] < losses[0] and torch.equal(packed, before)
    return engine


def test_an_adapter_of_4_bit_weights_is_saved_and_merged_in_full_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    warn_once.cache_clear()
    base = save_llama(tmp_path / "base")
    engine = train_quantized(base)
    checkpoint = engine.save_checkpoint(tmp_path / "run")
    names = StoredTensors(checkpoint / "state").kinds
    assert all("lora_" in name for name in names if name.startswith("model."))
    engine.load_checkpoint(tmp_path / "run")
    engine.export(tmp_path / "adapter", merge=False)
    engine.export(tmp_path / "merged", merge=True)
    engine.close()
    assert "trained on quantized weights" in capsys.readouterr().err
    rapidformer.export(checkpoint, tmp_path / "exported", verify=False)

    plain = LlamaForCausalLM.from_pretrained(base)
    expected = PeftModel.from_pretrained(plain, tmp_path / "adapter")(IDS).logits
    for name in ("merged", "exported"):
        assert "quantization_config" not in json.loads(
            (tmp_path / name / "config.json").read_text()
        )
        found = LlamaForCausalLM.from_pretrained(tmp_path / name)(IDS).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("lora_B" in name and tensor.any() for name, tensor in weights.items())


def test_an_adapter_is_not_merged_into_files_that_are_quantized(tmp_path: Path) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file = save_llama(tmp_path / "base") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    config = SimpleNamespace(quantization_config=settings)
    with pytest.raises(ModelError, match=r"the files of .* are quantized.*--base MODEL"):
        forget_quantization(config, str(file.parent))
