"""An engine whose model another one has taken over, and engines that fail half-way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rapidformer import RapidformerEngine
from rapidformer.errors import RapidformerError
from tests.accel.models import make

QUIET = {"log_level": "error", "lr": 0.1}


def test_an_engine_whose_model_was_taken_over_trains_no_more() -> None:
    model = nn.Linear(2, 1)
    first, second = RapidformerEngine(args=QUIET), RapidformerEngine(args=QUIET)
    first.compose(model)
    second.compose(model)
    before = model.weight.detach().clone()
    with pytest.raises(RapidformerError, match="another engine has composed its model"):
        first.backward(model(torch.ones(1, 2)).sum(), weight=1)
    with pytest.raises(RapidformerError, match="another engine has composed its model"):
        first.step()
    assert torch.equal(model.weight, before)


def test_an_optimizer_without_the_adapters_is_refused_every_time() -> None:
    model: Any = make("bert")
    engine = RapidformerEngine(args={**QUIET, "lora_rank": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(RapidformerError, match="built before the adapters"):
            engine.compose(model, optimizer)
    assert not hasattr(model, "peft_config"), "the model is as it was"


def test_a_refused_optimizer_keeps_its_parameters() -> None:
    model, other = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    engine = RapidformerEngine(args=QUIET)
    with pytest.raises(RapidformerError, match="not in the model"):
        engine.compose(model, optimizer)
    engine.close()
    assert len(optimizer.param_groups[0]["params"]) == 3


def test_a_second_engine_follows_the_first_ones_loader() -> None:
    rows = [{"x": torch.ones(2), "labels": torch.tensor(0)} for _ in range(4)]
    model = nn.Linear(2, 1)
    first = RapidformerEngine(args=QUIET)
    *_, loader = first.compose(model, train_dataloader=DataLoader(rows, batch_size=2))
    first.close()
    assert loader.follow is None
    second = RapidformerEngine(args=QUIET)
    second.compose(model, train_dataloader=loader)
    assert second.data.train_loader is loader
    next(iter(loader))
    second.close()


def test_close_finishes_although_a_save_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    before = dict(vars(model))
    engine = RapidformerEngine(args=QUIET)
    engine.compose(model)

    def fail() -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(engine.checkpoints, "wait_for_save", fail)
    with pytest.raises(MemoryError):
        engine.close()
    assert type(model) is nn.Linear and vars(model).keys() == before.keys()
