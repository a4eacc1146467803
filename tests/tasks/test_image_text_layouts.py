"""Training on images is the same on any layout, and as a bare loop over the model's own loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_in_processes
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
LORA = {"lora_rank": 2, "lora_target_modules": ["q_proj", "v_proj"]}
_FROZEN = re.compile(r"vision_tower|vision_model|visual|multi_modal_projector|connector")
Weights = list[dict[str, Tensor]]


def run_task(family: str, folder: Path, rows: int = 8, **settings: Any) -> Recorder:
    return run_ours("image_text", folder / family, build_rows(rows), **{**_BATCH, **settings})


def run_bare(family: str, *, is_whole: bool, rows: int = 8) -> Weights:
    """Torch and transformers alone: labels are what follows the last ``assistant :``."""
    model, processor = build_model(family), build_processor(family)
    trained = {
        name: p for name, p in model.named_parameters() if is_whole or not _FROZEN.search(name)
    }
    optimizer = torch.optim.SGD(trained.values(), lr=LEARNING_RATE)
    table, steps = build_rows(rows), []
    for start in range(0, rows, 4):
        model(**_build_batch(processor, table[start : start + 4])).loss.backward()
        optimizer.step()
        model.zero_grad()
        steps.append({name: p.detach().clone() for name, p in trained.items()})
    return steps


def _build_batch(processor: Any, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
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
    expected = run_bare(family, is_whole=True)
    whole = run_task(family, folder, micro_batch_size=1, **TRAINED)
    check_equal(whole.weights, expected)
    moved = [float((w - expected[0][n]).abs().max()) for n, w in whole.weights[1].items()]
    assert sum(gap > 0 for gap in moved) > 0.7 * len(moved)  # tower and projector learn, too


def test_frozen_towers(folder: Path) -> None:
    result = run_task("gemma3", folder, micro_batch_size=4)
    check_equal(result.weights, run_bare("gemma3", is_whole=False))


def run_layouts(folder: Path) -> list[Weights]:
    cases = [("qwen3_vl", TRAINED | ZERO), ("llava", TRAINED)]
    return [run_task(family, folder, **settings).weights for family, settings in cases]


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    """A sharded and a whole model; of each update, one process has no images."""
    wanted = [run_bare(family, is_whole=True) for family in ("qwen3_vl", "llava")]
    for results in run_in_processes(run_layouts, 2, folder):
        for result, one in zip(results, wanted, strict=True):
            check_equal(result, one)
