"""Training on images is the same on any layout, and as a bare loop over the model's own loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from rapidformer.cli.main import main
from rapidformer.compat.transformers_processors import load_auto_processor
from tests.processes import run_in_kept_processes
from tests.tasks.image_text_rig import (
    FAMILIES,
    build_model,
    build_processor,
    build_rows,
    save_family,
)
from tests.tasks.preference_rig import LEARNING_RATE, Recorder, run_ours

TRAINED = {"train_vision": True, "train_projector": True}
ZERO = {"zero_3_memory_optimization": True}
# An update has 4 rows, of which the first two have images: the second process has none.
_BATCH = {"global_batch_size": 4, "micro_batch_size": 2, "seq_length": 128}
LORA = {"lora_rank": 2, "lora_target_modules": ["all-linear"]}
_FROZEN = r".*(vision_tower|vision_model|visual|multi_modal_projector|connector).*"
Weights = list[dict[str, Tensor]]


def run_task(family: str, folder: Path, rows: int = 8, **settings: Any) -> Recorder:
    return run_ours("image_text", folder / family, build_rows(rows), **{**_BATCH, **settings})


def run_bare(
    model: nn.Module, family: str, *, is_whole: bool, rows: int = 8, is_double: bool = False
) -> Weights:
    """Torch and transformers alone: labels are what follows the last ``assistant :``."""
    processor = build_processor(family)
    model.to(torch.float64 if is_double else torch.float32)
    trained = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and (is_whole or not re.match(_FROZEN, name))
    }
    optimizer = torch.optim.SGD(trained.values(), lr=LEARNING_RATE)
    table, steps = build_rows(rows), []
    for start in range(0, rows, 4):
        batch = build_batch(processor, table[start : start + 4])
        if is_double:
            batch |= {name: t.double() for name, t in batch.items() if t.is_floating_point()}
        model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad()
        steps.append({name: p.detach().clone() for name, p in trained.items()})
    return steps


def build_adapted(family: str, weights: Weights) -> nn.Module:
    """The adapters as plain peft adds them; after a first step, A is still what it was drawn as."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, lora_alpha=4, target_modules="all-linear", exclude_modules=_FROZEN,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model: Any = get_peft_model(build_model(family), config).get_base_model()
    drawn = {name: weight for name, weight in weights[0].items() if "lora_A" in name}
    assert not model.load_state_dict(drawn, strict=False).unexpected_keys
    return model


def build_batch(processor: Any, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    texts = [processor.tokenizer.apply_chat_template(
        row["messages"], tokenize=False, chat_template=processor.chat_template
    ) for row in rows]  # fmt: skip
    batch = processor(
        text=texts, images=[row["images"] for row in rows], padding=True, return_tensors="pt"
    )
    said = processor.tokenizer.convert_tokens_to_ids("assistant")
    labels = batch["input_ids"].clone()
    for row in labels:
        row[: int((row == said).nonzero()[-1]) + 2] = -100
    return {**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


def check_equal(result: Weights, expected: Weights) -> None:
    assert len(result) == len(expected) == 2
    for weights, wanted in zip(result, expected, strict=True):
        assert weights.keys() == wanted.keys()
        for name, weight in weights.items():
            gap = float((weight - wanted[name]).abs().max())
            assert gap < 1e-6, f"{name}: {gap:.1e}"  # at a learning rate of 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_family(family, path)
    return path


@pytest.mark.parametrize("family", ["idefics3", "mistral3"])
def test_one_process(family: str, folder: Path) -> None:
    """Of the four micro-batches of an update, two have no images."""
    expected = run_bare(build_model(family), family, is_whole=True)
    whole = run_task(family, folder, micro_batch_size=1, **TRAINED)
    check_equal(whole.weights, expected)
    moved = [float((w - expected[0][n]).abs().max()) for n, w in whole.weights[1].items()]
    assert sum(gap > 0 for gap in moved) > 0.7 * len(moved)  # tower and projector learn, too


def test_frozen_towers(folder: Path) -> None:
    result = run_task("llava", folder, micro_batch_size=4)
    check_equal(result.weights, run_bare(build_model("llava"), "llava", is_whole=False))


def test_adapters(folder: Path) -> None:
    """``all-linear`` reaches the language model alone, as in plain peft without the tower."""
    result = run_task("llava", folder, **LORA).weights
    model = build_adapted("llava", result)
    check_equal(result, run_bare(model, "llava", is_whole=True))


@pytest.mark.parametrize("settings", [TRAINED, LORA | {"train_vision": True}])
def test_an_export_is_the_trained_model(
    settings: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Plain transformers loads it with its processor, and computes the same logits."""
    from peft import PeftModel

    run, exported = tmp_path / "run", tmp_path / "exported"
    weights = run_task("qwen3_vl", folder, 4, save=str(run), **settings).weights[-1]
    assert main(["export", str(run), str(exported), "--no-verify"]) == 0
    model, report = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    trained: Any = build_model("qwen3_vl")
    start = {name: weight.clone() for name, weight in trained.state_dict().items()}
    moved = [name for name, p in model.state_dict().items() if not torch.equal(p, start[name])]
    assert sum("visual.blocks" in name for name in moved) > 5
    if "lora_rank" in settings:
        trained = PeftModel.from_pretrained(trained, str(run / "last")).get_base_model()
    assert not trained.eval().load_state_dict(weights, strict=False).unexpected_keys
    whole = build_batch(load_auto_processor(str(exported)), build_rows(4))
    text = {name: whole[name][2:] for name in ("input_ids", "attention_mask")}
    for batch in (whole, text):
        with torch.no_grad():
            torch.testing.assert_close(
                model(**batch).logits, trained(**batch).logits, rtol=0, atol=5e-6
            )


def run_layouts(folder: Path) -> list[Weights]:
    cases = [("qwen3_vl", TRAINED | ZERO), ("llava", TRAINED)]
    return [run_task(family, folder, **settings).weights for family, settings in cases]


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    """A sharded and a whole model; of each update, one process has no images."""
    wanted = [
        run_bare(build_model(family), family, is_whole=True) for family in ("qwen3_vl", "llava")
    ]
    for results in run_in_kept_processes(run_layouts, 2, folder):
        for result, one in zip(results, wanted, strict=True):
            check_equal(result, one)
