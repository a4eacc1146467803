"""Adapters in Python, in one process: models that users bring, and what is saved of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from rapidformer import RapidformerEngine
from rapidformer.compat import transformers_scans
from rapidformer.errors import CheckpointError, ModelError
from rapidformer.models.adapter_config import to_text
from rapidformer.models.adapter_folder import load_adapter
from rapidformer.models.adapters import Adapter

IDS = torch.arange(8)[None]


def build_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def compose(model: nn.Module, **settings: Any) -> tuple[RapidformerEngine, Any]:
    engine = RapidformerEngine(args={"lr": 0.1, "log_level": "error", **settings})
    return engine, engine.compose(model)[0]


def train(engine: RapidformerEngine, model: Any) -> None:
    for _ in range(2):
        engine.backward(model(input_ids=IDS, labels=IDS).loss, weight=7)
        engine.step()


def test_a_merged_export_leaves_the_trained_model_unchanged(tmp_path: Path) -> None:
    engine, model = compose(build_llama(), lora_rank=2)
    train(engine, model)
    before = model(input_ids=IDS).logits
    engine.export(tmp_path / "merged")
    assert torch.equal(model(input_ids=IDS).logits, before)
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-6)


def test_many_layers_are_described_by_the_ends_of_their_names() -> None:
    for layers, text in ((2, "layers.0.down, layers.0.up, layers.1.down"), (5, "on down, up")):
        names = [f"layers.{n}.{end}" for n in range(layers) for end in ("up", "down")]
        config = LoraConfig(r=2, target_modules=names)
        assert text in Adapter(config=config, name="default", base=None).describe()


def test_the_active_one_of_two_adapters_is_trained_and_saved(tmp_path: Path) -> None:
    adapted = get_peft_model(build_llama(), LoraConfig(r=2))
    adapted.add_adapter("second", LoraConfig(r=4))
    adapted.set_adapter("second")
    engine, model = compose(adapted)
    train(engine, model)
    engine.export(tmp_path / "adapter", merge=False)
    assert PeftModel.from_pretrained(build_llama(), tmp_path / "adapter").peft_config[
        "default"
    ].r == 4  # fmt: skip


def test_a_frozen_adapter_is_refused_with_the_way_to_load_it(tmp_path: Path) -> None:
    get_peft_model(build_llama(), LoraConfig(r=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is frozen.*is_trainable=True"):
        compose(PeftModel.from_pretrained(build_llama(), tmp_path))


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (["*q_proj"], r"nothing to repeat at position 0\. Its linear and embedding layers are"),
        (["q_proj,v_proj"], "not found in the base model.*layers are embed_tokens, q_proj"),
    ],
)
def test_targets_that_name_no_layer(targets: list[str], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        compose(build_llama(), lora_rank=2, lora_target_modules=targets)


def test_an_empty_list_of_targets_means_the_usual_ones() -> None:
    _, model = compose(build_llama(), lora_rank=2, lora_target_modules=[])
    assert model.peft_config["default"].target_modules == {"q_proj", "v_proj"}


def build_encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True))


@pytest.fixture
def _fast_path() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(was_enabled)


@pytest.mark.usefixtures("_fast_path")
def test_layers_that_torch_never_calls_are_not_adapted() -> None:
    """nn.MultiheadAttention only reads a layer's weight."""
    engine, _ = compose(build_encoder(), lora_rank=2)
    assert engine.model.adapter.describe() == "LORA, rank 2 on 0.linear1, 0.linear2"
    with pytest.raises(ModelError, match=r"out_proj would never be.*it: self_attn\."):
        compose(build_encoder(), lora_rank=2, lora_target_modules=["out_proj"])


def test_layers_that_peft_refuses_are_not_adapted() -> None:
    """Kernels for Mamba read the weight of the projection after the scan."""
    config = FalconH1Config(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, mamba_d_ssm=32, mamba_n_heads=4,
        mamba_d_head=8, mamba_d_state=8,
    )  # fmt: skip
    engine, _ = compose(FalconH1ForCausalLM(config), lora_rank=2)
    described = engine.model.adapter.describe()
    assert "in_proj" in described and "out_proj" not in described


def build_bamba() -> BambaForCausalLM:
    config = BambaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, mamba_n_heads=4, mamba_d_state=8,
        attn_layer_indices=[1],
    )  # fmt: skip
    return BambaForCausalLM(config)


@pytest.mark.parametrize("is_installed", [False, True])
def test_layers_that_a_kernel_of_mamba_never_calls_are_not_adapted(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft refuses them in some models only; without the kernel, they are called."""
    monkeypatch.setattr(transformers_scans, "find_spec", lambda name: is_installed or None)
    engine, _ = compose(build_bamba(), lora_rank=2)
    described = engine.model.adapter.describe()
    assert "in_proj" in described and ("out_proj" in described) is not is_installed
    if is_installed:
        with pytest.raises(ModelError, match=r"out_proj would never be trained: BambaMixer does"):
            compose(build_bamba(), lora_rank=2, lora_target_modules=["out_proj"])


@pytest.mark.parametrize(
    ("model_class", "head"),
    [(BertForTokenClassification, "classifier"), (BertForQuestionAnswering, "qa_outputs")],
)
def test_a_head_that_is_trained_whole_is_not_adapted(model_class: Any, head: str) -> None:
    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    engine, _ = compose(model_class(config), lora_rank=2, lora_target_modules=["all-linear"])
    assert head not in engine.model.adapter.describe().partition(";")[0]


@pytest.mark.usefixtures("_fast_path")
@pytest.mark.parametrize("source", ["flags", "peft", "folder"])
def test_adapters_of_an_encoder_layer_run_in_evaluation(source: str, tmp_path: Path) -> None:
    """There, the layer would pass its weights to one kernel, wherever its adapters come from."""
    config = LoraConfig(r=2, target_modules=["linear1"], init_lora_weights=False)
    if source == "flags":
        model = compose(build_encoder(), peft_config=to_text(config))[1]
    elif source == "peft":
        model = compose(get_peft_model(build_encoder(), config))[1]
    else:
        get_peft_model(build_encoder(), config).save_pretrained(tmp_path)
        model = load_adapter(build_encoder(), tmp_path)
    hidden = torch.rand(1, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(hidden), model.train()(hidden))
    assert torch.backends.mha.get_fastpath_enabled()  # other models keep it


@pytest.mark.usefixtures("_fast_path")
def test_an_encoder_with_adapters_makes_no_nested_tensors() -> None:
    """They need the kernel that adapters are not in."""
    encoder = nn.TransformerEncoder(build_encoder()[0], num_layers=2)
    config = LoraConfig(r=2, target_modules=["linear1"], init_lora_weights=False)
    engine, model = compose(get_peft_model(encoder, config))
    hidden, padding = torch.rand(2, 4, 8), torch.tensor([[False] * 4, [False] * 2 + [True] * 2])
    with torch.no_grad():
        evaluated = model.eval()(hidden, src_key_padding_mask=padding)
        trained = model.train()(hidden, src_key_padding_mask=padding)
    torch.testing.assert_close(evaluated[~padding], trained[~padding])
    engine.close()
    assert encoder.use_nested_tensor


def test_a_model_without_a_config_is_saved_with_its_adapters(tmp_path: Path) -> None:
    engine, model = compose(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), lora_rank=2)
    engine.export(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    with pytest.raises(ModelError, match="has no config"):
        engine.export(tmp_path / "merged", merge=True)


def test_resuming_without_the_adapter_says_which_flag_is_missing(tmp_path: Path) -> None:
    build_llama().save_pretrained(tmp_path / "base")
    engine, model = compose(LlamaForCausalLM.from_pretrained(tmp_path / "base"), lora_rank=2)
    train(engine, model)
    engine.save_checkpoint(tmp_path / "run")
    engine.checkpoints.release_folder()
    other, _ = compose(LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    with pytest.raises(CheckpointError, match=r"holds the adapter of a model.*--lora-rank"):
        other.load_checkpoint(tmp_path / "run")


def test_weights_edited_in_memory_are_not_merged_from_their_file(tmp_path: Path) -> None:
    build_llama().save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    engine, _ = compose(base, lora_rank=2)
    engine.export(tmp_path / "same", merge=True)
    with torch.no_grad():
        base.lm_head.weight[0, 0] += 1
    with pytest.raises(ModelError, match=r"in memory are not those in .*lm_head.weight differ\."):
        engine.export(tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_resized_vocabulary_is_saved_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model's files do not have the rows of the new words."""
    build_llama().save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(18)
    engine, model = compose(base, lora_rank=2, log_level="warning")
    assert "has 18 words, its files in" in capsys.readouterr().err
    train(engine, model)
    engine.export(tmp_path / "out")
    model.eval()
    ids = torch.tensor([[1, 17, 3]])
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(ids).logits, model(input_ids=ids).logits)
