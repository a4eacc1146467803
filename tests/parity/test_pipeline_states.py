"""What a model in stages has beside its weights: buffers that count, adapters around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ModelError
from tests.parity.harness import PADDED, PIPELINE, keep_rate, make_sgd, train
from tests.parity.models import build_model, build_rows, collate
from tests.parity.own_models import VOCABULARY
from tests.processes import run_in_kept_processes


class _CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(torch.tanh(self.inner(hidden)).transpose(1, 2)).transpose(1, 2)


class _Counting(nn.Module):
    """Running means before the blocks and in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("drawn", torch.rand(16))
        self.layers = nn.ModuleList([_CountingBlock() for _ in range(4)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, Any]:
        hidden = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2) + self.drawn
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def _train_counting(folder: Path, settings: dict[str, Any]) -> float:
    engine = RapidformerEngine(args={**PADDED, **settings})
    torch.manual_seed(3 + engine.runtime.topology.get_rank("pipeline"))  # the first process's count
    model = _Counting()
    rows = build_rows("llama", 16)
    loader = engine.data.build_loader(rows, collate, shuffle=False, is_training=True)
    engine.compose(model, make_sgd(model), keep_rate)
    train(engine, model, loader)
    engine.export(folder / "model")
    engine.save_checkpoint(folder / "saved")
    for buffer in model.buffers():
        buffer.zero_()
    engine.load_checkpoint(folder / "saved")
    model.eval()
    with torch.no_grad():
        loss = float(model(**collate(rows[:2]))["loss"])
    engine.close()
    return loss


def test_running_means_are_those_of_the_stage_that_has_the_layer(tmp_path: Path) -> None:
    expected = run_in_kept_processes(_train_counting, 1, tmp_path / "one", {})
    losses = run_in_kept_processes(_train_counting, 2, tmp_path / "two", {PIPELINE: 2})
    assert losses == pytest.approx(expected * 2, rel=1e-6)
    one, two = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-6), name


def _save_tied(folder: Path) -> None:
    engine = RapidformerEngine(args={**PADDED, PIPELINE: 2})
    model = build_model("gpt2", layers=4)
    engine.compose(model, make_sgd(model), keep_rate)
    engine.save_checkpoint(folder)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    engine.load_checkpoint(folder)
    engine.export(folder / "model")
    engine.close()


def test_a_tied_weight_of_two_stages_is_stored_once(tmp_path: Path) -> None:
    run_in_kept_processes(_save_tied, 2, tmp_path)
    stored = StoredTensors(tmp_path / "iter_0000000" / "state").kinds
    embedding, head = "model.transformer.wte.weight", "model.lm_head.weight"
    assert embedding in stored and head not in stored
    expected: Any = build_model("gpt2", layers=4)
    found = type(expected).from_pretrained(tmp_path / "model")
    for (name, weight), other in zip(
        expected.state_dict().items(), found.state_dict().values(), strict=True
    ):
        assert torch.equal(weight, other), name


class _Adapted(nn.Module):
    """As adapters do it: another model inside, which generates by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = build_model("llama", layers=4)
        self.config = self.inner.config

    def get_base_model(self) -> nn.Module:
        return self.inner  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.inner(input_ids=input_ids, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.generate(*args, **kwargs)


def _call_adapted(settings: dict[str, Any]) -> tuple[list[str], list[list[int]]]:
    engine = RapidformerEngine(args={**PADDED, **settings})
    model = _Adapted()
    engine.compose(model)
    model.eval()
    ids = torch.tensor([[5, 6, 7], [9, 10, 11]])
    with torch.no_grad():
        output = model(ids)
    options = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    texts = model.generate(ids, **options).tolist()
    engine.close()
    return list(output), texts


def test_a_model_around_another_generates_and_sends_no_cache() -> None:
    _, texts = _call_adapted({})
    assert run_in_kept_processes(_call_adapted, 2, {PIPELINE: 2}) == [(["logits"], texts)] * 2


def _compose_changed() -> str:
    engine = RapidformerEngine(args={**PADDED, PIPELINE: 2})
    inner = engine.build_model(lambda: build_model("llama", layers=4))
    with pytest.raises(ModelError) as refused:
        engine.compose(nn.Sequential(inner))
    engine.close()
    return str(refused.value)


def test_a_model_that_was_wrapped_after_it_was_built_is_refused() -> None:
    for message in run_in_kept_processes(_compose_changed, 2):
        assert "of Sequential cannot be initialised" in message
        assert "Do all of it inside: engine.build_model(" in message
