"""Weights from a file into a model that exists already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rapidformer.dialects.huggingface.weights import load_weights
from rapidformer.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.layers[0].weight


def get_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = {name: torch.full_like(w, 0.5) for name, w in model.state_dict().items()}
    del weights["head.weight"]  # stored once
    return weights


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "mine.bin"])
def test_single_files_are_loaded(name: str, tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / name
    weights = get_weights(model)
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    load_weights(model, path if name.startswith("mine") else tmp_path, best=False)
    assert all(bool((weight == 0.5).all()) for weight in model.state_dict().values())


def test_names_that_do_not_match_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = Tied()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = {name.replace("layers.", "layer."): w for name, w in get_weights(model).items()}
    weights["layers.1.bias"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path, best=False)
    text = str(caught.value)
    assert "does not fit Tied:" in text
    assert "missing (6): layers.{0-2}.weight, layers.{0,2}.bias, head.weight" in text
    assert "unexpected (6): layer.{0-2}." in text
    assert "wrong shape (1): layers.1.bias (saved [3], needed [2])" in text
    assert (
        "did you mean: layer.{0-2}.weight in the file for layers.{0-2}.weight in the model?" in text
    )
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_files_that_are_not_weights_are_refused(tmp_path: Path) -> None:
    for name, content in (("a.bin", [1, 2]), ("b.bin", Path("x"))):
        torch.save(content, tmp_path / name)
    (tmp_path / "c.safetensors").write_bytes(b"x" * 20)
    for name, message in (
        ("a.bin", "is not a dictionary of weights by name"),
        ("b.bin", "cannot be read: "),
        ("c.safetensors", "cannot be read: "),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_weights(Tied(), tmp_path / name, best=False)
