"""``--allow-partial-load`` and ``rapidformer export`` on checkpoints of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

import rapidformer
from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.engine import RapidformerEngine
from tests.parity.models import build_model, build_rows, collate
from tests.processes import run_in_kept_processes

LARGER: dict[str, dict[str, Any]] = {
    "stages": {"pipeline_model_parallel_size": 2},
    "shards": {"zero_3_memory_optimization": True},
}


def _train(layers: int, settings: dict[str, Any]) -> RapidformerEngine:
    values = {"device": "cpu", "lr": 0.01, "global_batch_size": 4, "micro_batch_size": 1}
    engine = RapidformerEngine(args={**values, "log_level": "error", **settings})
    model = build_model("small-gpt2", layers=layers)
    loader = engine.data.build_loader(build_rows("small-gpt2", 8), collate, is_training=True)
    (model, *_) = engine.compose(model)
    if engine.args.load:
        engine.load_checkpoint()
        return engine
    update = next(iter(engine.data.iterate_updates(loader)))
    engine.run_update(lambda batch: model(**batch)["loss"], update)
    engine.step()
    return engine


def _save_all(folder: Path) -> None:
    torch.set_num_threads(1)
    _train(2, {"zero_2_memory_optimization": True}).save_checkpoint(folder / "saved")
    for name, settings in LARGER.items():
        partial = {"load": str(folder / "saved"), "allow_partial_load": True}
        _train(3, {**settings, **partial}).save_checkpoint(folder / name)


def read(run: Path) -> dict[str, Tensor]:
    folder = run / "iter_0000001" / "state"
    stored = StoredTensors(folder)
    kinds = stored.kinds.items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds}
    stored.fill(tensors.items())
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_in_kept_processes(_save_all, 2, folder)
    return folder


@pytest.mark.parametrize("name", LARGER)
def test_what_matches_is_loaded_and_the_rest_keeps_its_values(name: str, folder: Path) -> None:
    saved, found = read(folder / "saved"), read(folder / name)
    fresh = build_model("small-gpt2", layers=3).state_dict()
    assert saved.keys() < found.keys()
    for key, value in found.items():
        assert "h.2." not in key or not key.startswith("optimizer."), "state from scratch"
        assert torch.equal(value, saved[key] if key in saved else fresh[key.removeprefix("model.")])


def test_sharded_gradients_and_states_are_exported_whole(folder: Path, tmp_path: Path) -> None:
    rapidformer.export(folder / "saved", tmp_path / "out", verify=False)
    exported = GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
    saved = {k.removeprefix("model."): v for k, v in read(folder / "saved").items()}
    assert all(torch.equal(v, saved[k]) for k, v in exported.items() if k != "lm_head.weight")
