from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from rapidformer.config import Settings
from rapidformer.errors import ModelError
from rapidformer.models.adapters import add_adapters
from rapidformer.models.build import build_pretrained
from rapidformer.models.configuration import get_position_limit, get_size
from rapidformer.models.plan import find_plan
from rapidformer.models.processor_files import keep_processor_files
from rapidformer.models.towers import (
    choose_auto_class,
    find_towers,
    freeze_towers,
    list_left_out,
    list_placeholders,
)
from rapidformer.models.work import count_work
from tests.parity.seeing import IMAGE, SETTINGS, build_seeing

TEXT, WHOLE = "AutoModelForCausalLM", "AutoModelForMultimodalLM"
PARTS = {
    "qwen3_vl": (["model.visual"], ["model.visual.merger", "model.visual.deepstack_merger_list"]),
    "qwen3_5": (["model.visual"], ["model.visual.merger"]),
    "gemma3": (["model.vision_tower"], ["model.multi_modal_projector"]),
    "smolvlm": (["model.vision_model"], ["model.connector"]),
    "llava": (["model.vision_tower"], ["model.multi_modal_projector"]),
    "mistral3": (["model.vision_tower"], ["model.multi_modal_projector"]),
    "llama4": (["vision_model"], ["multi_modal_projector"]),
    "mllama": (
        ["model.vision_model"], ["model.multi_modal_projector", "model.language_model.layers.1"],
    ),
    "voxtral": (["model.audio_tower"], ["model.multi_modal_projector"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_parts_are_found_and_text_reaches_all_that_is_trained(kind: str) -> None:
    model: Any = build_seeing(kind)
    parts = find_towers(model)
    assert (list(parts.towers), list(parts.projectors)) == PARTS[kind]
    freeze_towers(model, Settings())
    ids = torch.randint(3, IMAGE, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    language = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(language) > 11 and not any(map(parts.is_in_tower, language))
    assert all("vi" not in block and "audio" not in block for block in find_plan(model).blocks)
    assert (get_size(model.config, "vocab_size"), get_size(model.config, "num_layers")) == (68, 2)
    assert get_position_limit(model.config) is None and IMAGE in list_placeholders(model.config)


def test_a_model_of_text_has_no_parts() -> None:
    assert not find_towers(nn.Linear(2, 2))
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=1, vocab_size=16)
    model = build_text(config)
    freeze_towers(model, Settings())
    assert not find_towers(model) and all(p.requires_grad for p in model.parameters())
    assert not list_placeholders(config)


def build_text(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def test_the_auto_class_is_that_of_the_whole_model() -> None:
    for kind, settings in SETTINGS.items():
        assert choose_auto_class(TEXT, AutoConfig.for_model(kind, **settings(2))) == WHOLE
    for kind in ("gpt2", "gemma3_text", "qwen3_5_text", "clip", "t5"):
        assert choose_auto_class(TEXT, AutoConfig.for_model(kind)) == TEXT
    seeing = AutoConfig.for_model("llava", **SETTINGS["llava"](2))
    assert choose_auto_class("AutoModel", seeing) == "AutoModel"


def test_what_is_asked_for_is_trained() -> None:
    def list_trained(**flags: bool) -> set[str]:
        model = build_seeing("qwen3_vl")
        freeze_towers(model, Settings(**flags))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        return {".".join(name.split(".")[1:3]) for name in names}

    text = {f"language_model.{part}" for part in ("embed_tokens", "layers", "norm")}
    projector = {"visual.merger", "visual.deepstack_merger_list"}
    tower = {"visual.patch_embed", "visual.pos_embed", "visual.blocks"}
    assert list_trained() == text
    assert list_trained(train_projector=True) == text | projector
    assert list_trained(train_vision=True) == text | tower
    assert list_trained(train_vision=True, train_projector=True) == text | tower | projector


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj", "fc1", "linear_1"]])
def test_adapters_are_in_the_language_model_alone(targets: list[str] | None) -> None:
    def list_adapted(**flags: Any) -> set[str]:
        settings = Settings(lora_rank=2, lora_target_modules=targets, **flags)
        model: Any = add_adapters(build_seeing("llava"), settings)
        assert model.peft_config["default"].task_type == "CAUSAL_LM"
        names = [name for name, _ in model.named_modules() if name.endswith("lora_A.default")]
        return {name.split(".")[1] for name in names}

    assert list_adapted() == {"language_model"}
    with_tower = list_adapted(train_vision=True)
    assert with_tower == {"language_model", "vision_tower"}
    with_projector = list_adapted(train_projector=True)
    assert with_projector == {"language_model", "multi_modal_projector"}


def test_a_pattern_of_the_user_decides_by_itself() -> None:
    pattern = r".*vision_tower.*\.q_proj"
    model = add_adapters(
        build_seeing("llava"), Settings(lora_rank=2, lora_target_modules=[pattern])
    )
    adapted = [name for name, _ in model.named_modules() if name.endswith("lora_A.default")]
    assert adapted and all("vision_tower" in name for name in adapted)


def test_a_projector_inside_its_tower_can_be_adapted_alone() -> None:
    left_out = list_left_out(build_seeing("qwen3_vl"), Settings(train_projector=True))
    names = ("patch_embed", "pos_embed", "rotary_pos_emb", "blocks")
    assert sorted(left_out) == sorted(f"model.visual.{name}" for name in names)


def test_work_of_a_tower_that_text_does_not_reach_is_not_counted() -> None:
    model: Any = build_seeing("llava")
    freeze_towers(model, Settings())
    weights = [
        module.weight.numel()
        for part in (model.model.language_model, model.lm_head)
        for module in part.modules()
        if isinstance(module, nn.Linear)
    ]
    work = count_work(model)
    assert work.weights == sum(weights) and work.per_token == 6 * sum(weights)
    assert work.per_pair == 12 * 2 * 2 * 8


def test_weights_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_seeing("qwen3_5").save_pretrained(tmp_path)
    args = Settings(pretrained_model_name_or_path=str(tmp_path))
    model: Any = build_pretrained(TEXT, args)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert not any(p.requires_grad for p in model.model.visual.parameters())
    file = tmp_path / "model.safetensors"
    weights = {**load_file(file), "model.depth_tower.weight": torch.zeros(3)}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected \(1\): model.depth_tower.weight"):
        build_pretrained(TEXT, args)


def test_processor_files_are_kept_byte_for_byte(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    build_seeing("llava").config.save_pretrained(tmp_path / "from")
    content = b'{"processor_class":  "LlavaProcessor"}\r\n'
    (tmp_path / "from" / "processor_config.json").write_bytes(content)
    args = Settings(pretrained_model_name_or_path=str(tmp_path / "from"))
    kept = keep_processor_files(Tokenizer(), args)
    (tmp_path / "from" / "processor_config.json").unlink()
    kept.save_pretrained(tmp_path / "to")
    assert (tmp_path / "to" / "processor_config.json").read_bytes() == content
    assert {path.name for path in (tmp_path / "to").iterdir()} == {
        "processor_config.json", "tokenizer.json",
    }  # fmt: skip
