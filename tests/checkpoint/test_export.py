"""Exported models: transformers loads them as they are, with the very weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rapidformer.accel.precision.autocast import apply_mixed_precision
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.checkpoint.export import export_model
from rapidformer.dist.topology import Topology
from rapidformer.errors import WriteError
from rapidformer.models.plan import find_plan
from tests.accel.models import make, make_batch

AUTO = {"bert": AutoModelForSequenceClassification, "gpt2": AutoModelForCausalLM}


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("has_switches", [False, True], ids=["plain", "switches"])
def test_transformers_loads_the_folder(family: str, has_switches: bool, tmp_path: Path) -> None:
    model = make(family)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    reference = make(family).eval()
    if has_switches:
        apply_recompute(model, find_plan(model))
        precision = Precision(dtype=torch.bfloat16, reason="test")
        apply_mixed_precision(model, precision, torch.device("cpu"))
    export_model(model, tmp_path / "out", Topology())
    loaded = AUTO[family].from_pretrained(tmp_path / "out")
    assert type(loaded) is type(reference)
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].dtype is value.dtype
    with torch.no_grad():
        outputs = [m(**make_batch(family)).logits for m in (loaded.eval(), reference)]
    assert torch.equal(*outputs)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(reference).__name__]
    assert config.get("use_cache", True) == getattr(reference.config, "use_cache", True)


def test_tied_weight_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    model = make("gpt2")
    export_model(model, tmp_path / "out", Topology())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert len({"lm_head.weight", "transformer.wte.weight"} & stored.keys()) == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_model_of_the_users_own(tmp_path: Path) -> None:
    model = make("custom")
    model.head.weight = model.embedding.weight
    export_model(model, tmp_path / "out", Topology())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    twin = make("custom")
    twin.load_state_dict(stored)
    assert torch.equal(twin.head.weight, model.embedding.weight)


def test_processor_is_saved_beside_the_model(tmp_path: Path) -> None:
    class Processor:
        def save_pretrained(self, folder: Path) -> None:
            (Path(folder) / "tokenizer.json").write_text("{}")

    export_model(nn.Linear(1, 1), tmp_path / "deep" / "out", Topology(), processor=Processor())
    assert (tmp_path / "deep" / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "deep" / "out" / "model.safetensors").is_file()


def test_failed_export_leaves_the_older_model(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("disk full")

    model = nn.Linear(1, 1)
    export_model(model, tmp_path / "out", Topology())
    expected = model.weight.detach().clone()
    model.weight.data.fill_(9)
    with pytest.raises(WriteError, match="out cannot be written: disk full"):
        export_model(model, tmp_path / "out", Topology(), processor=Broken())
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], expected)


def test_export_replaces_an_older_one_whole(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    export_model(model, tmp_path / "out", Topology())
    (tmp_path / "out" / "stale.bin").write_text("old")
    model.weight.data.fill_(9)
    export_model(model, tmp_path / "out", Topology())
    assert not (tmp_path / "out" / "stale.bin").exists()
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].item() == 9
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_does_not_touch_the_model(tmp_path: Path) -> None:
    model = make("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [id(p) for p in model.parameters()]
    export_model(model, tmp_path / "out", Topology())
    assert [id(p) for p in model.parameters()] == parameters
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
