"""Files and folders of the user's own survive training and saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rapidformer import Accelerator
from rapidformer.errors import CheckpointError
from tests.dialects.small import make_classifier
from tests.dialects.test_trainer import make_trainer


def write_note(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "notes.txt"
    note.write_text("mine")
    return note


def test_an_accelerator_saves_beside_other_files(tmp_path: Path) -> None:
    note = write_note(tmp_path / "model")
    stale = tmp_path / "model" / "model-00001-of-00002.safetensors"
    stale.write_text("")  # of an earlier, larger model
    accelerator = Accelerator(cpu=True)
    model = make_classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_model(model, tmp_path / "model")
    assert note.read_text() == "mine"
    assert not stale.exists()
    type(model).from_pretrained(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "model.safetensors", "notes.txt",
    ]  # fmt: skip


def test_a_trainer_saves_beside_other_folders(tmp_path: Path) -> None:
    note = write_note(tmp_path / "model")
    make_trainer(tmp_path).save_model()
    assert note.read_text() == "mine"
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize("name", ["best", "last", "previous"])
def test_training_refuses_to_overwrite_a_folder_that_no_run_wrote(
    tmp_path: Path, name: str
) -> None:
    note = write_note(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"would overwrite .*{name}, which no run wrote"):
        make_trainer(tmp_path, max_steps=1).train()
    assert note.read_text() == "mine"
