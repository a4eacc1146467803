from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Siglip2Config, Siglip2Model
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from rapidformer.errors import DataError
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps

TASK = get_task("image_classification")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for name, level in (("dark", 40), ("light", 200)):
            target = tmp_path / "images" / split / name
            target.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(level - 30, level + 30, (10, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(target / f"{index}.png")
    return tmp_path / "images"


def test_trains_evaluates_and_predicts(vit_folder: Path, folder: Path, tmp_path: Path) -> None:
    args = make_args(pretrained_model_name_or_path=vit_folder, data_path=folder)
    prepared = TASK.prepare(args)
    assert len(prepared.train) == 8 and prepared.extras["names"] == ("dark", "light")
    assert prepared.train[0]["pixel_values"].shape == (3, 8, 8)
    model = TASK.build_model(args, prepared)
    losses = train_steps(TASK, model, prepared, steps=15)
    assert losses[-1] < losses[0]
    records = run_split(TASK, model, prepared, "test")
    metrics = compute_metrics(TASK, records, prepared, "test")
    assert metrics["accuracy"] == 1.0
    batch = prepared.collate([prepared.test[i] for i in range(4)])
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(float(model(**batch).loss), rel=1e-4)
    rows = TASK.predictions(records, prepared, "test")
    assert rows[0]["image"].endswith("test/dark/0.png") and rows[0]["label"] == "dark"

    model.save_pretrained(tmp_path / "model")
    prepared.processor.save_pretrained(tmp_path / "model")
    saved = make_args(load=tmp_path / "model")
    ready = TASK.prepare_for_prediction(saved, [str(folder / "test" / "light" / "0.png")])
    again = TASK.build_model(saved, ready)
    found = TASK.predictions(run_split(TASK, again, ready, "test"), ready, "test")
    assert found[0]["label"] == "light"


def test_all_that_the_processor_gives_reaches_the_model(folder: Path, tmp_path: Path) -> None:
    """SigLIP 2 also reads the shape of each image, and which of its patches are padding."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16}  # fmt: skip
    config = Siglip2Config(text_config=sizes, vision_config={**sizes, "num_patches": 16})
    Siglip2Model(config).save_pretrained(tmp_path)
    processor = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=16)
    processor.save_pretrained(tmp_path)
    args = make_args(pretrained_model_name_or_path=tmp_path, data_path=folder)
    prepared = TASK.prepare(args)
    model = TASK.build_model(args, prepared).eval()
    files = sorted(folder.glob("train/*/*.png"))
    wanted = processor(images=[Image.open(file) for file in files], return_tensors="pt")
    batch = prepared.collate([prepared.train[i] for i in range(len(files))])
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, model(**wanted).logits)


def test_from_scratch(folder: Path) -> None:
    args = make_args(
        model_type="vit", num_layers=1, hidden_size=16, num_attention_heads=2, image_size=16,
        patch_size=8, data_path=folder,
    )  # fmt: skip
    prepared = TASK.prepare(args)
    assert prepared.train[0]["pixel_values"].shape == (3, 16, 16)
    train_steps(TASK, TASK.build_model(args, prepared), prepared, steps=1)


def test_bad_images_are_reported(vit_folder: Path, tmp_path: Path) -> None:
    args: Any = make_args(pretrained_model_name_or_path=vit_folder)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = [
        {"image": str(tmp_path / "broken.png"), "label": "a"},
        {"image": str(tmp_path / "missing.png"), "label": "b"},
    ]
    prepared = TASK.prepare(args, {"train": rows})
    with pytest.raises(DataError, match=r"train, row 1: .*broken.png cannot be read as an image"):
        prepared.train[0]
    with pytest.raises(DataError, match=r"train, row 2: there is no image file .*missing.png"):
        prepared.train[1]
