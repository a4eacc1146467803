"""What is left of an engine that was closed or forgotten: nothing."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rapidformer import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.overlay import list_layers
from tests.processes import run_in_processes


def make_engine(**settings: Any) -> RapidformerEngine:
    return RapidformerEngine(args={"lr": 0.1, "log_level": "error", **settings})


def train(engine: RapidformerEngine, model: nn.Module, optimizer: Any, loader: Any) -> Any:
    """An epoch; returns the loader."""
    _, _, _, loader = engine.compose(model, optimizer, train_dataloader=loader)
    for batch in loader:
        engine.backward(model(batch["x"]).pow(2).mean())
        engine.step()
    return loader


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    rows: Any = [{"x": torch.rand(3)} for _ in range(4)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=2)


@pytest.mark.parametrize("closes", [True, False])
def test_no_hook_keeps_an_engine_alive(closes: bool) -> None:
    """Each of its hooks on model, optimizer and loader once did, with all optimizer state."""
    model, optimizer, given = make_parts()
    engine = make_engine()
    loader = train(engine, model, optimizer, given)
    parts = [engine, engine.data, engine.updates, engine.checkpoints]
    references = [weakref.ref(part) for part in parts]
    if closes:
        engine.close()
    del engine, parts
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert model is not None and optimizer is not None and loader is not None


def test_a_closed_engine_says_so() -> None:
    model, optimizer, loader = make_parts()
    engine = make_engine()
    train(engine, model, optimizer, loader)
    engine.close()
    engine.close()
    uses = [
        lambda: engine.backward(torch.ones(())),
        engine.step,
        lambda: engine.compose(model),
        lambda: engine.save_checkpoint("x"),
        lambda: engine.data.build_loader([1]),
        engine.explain,
    ]
    for use in uses:
        with pytest.raises(RapidformerError, match="this engine is closed"):
            use()
    assert engine.is_main and engine.args.lr == 0.1, "what it was may still be asked"


def test_optimizer_and_schedule_are_the_scripts_own_again() -> None:
    model, optimizer, loader = make_parts()
    engine = make_engine()
    train(engine, model, optimizer, loader)
    scheduler = engine.updates.lr_scheduler
    assert list_layers(optimizer) == list_layers(scheduler) == ["update"]
    engine.close()
    assert list_layers(optimizer) == list_layers(scheduler) == []
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))


def test_groups_added_after_compose_stay() -> None:
    """They were dropped, with their state."""
    model, optimizer, _ = make_parts()
    engine = make_engine()
    engine.compose(model, optimizer)
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    optimizer.state[added]["momentum_buffer"] = torch.ones(2)
    engine.close()
    (first, second) = optimizer.param_groups
    assert first["params"][0] is model.weight and len(first["params"]) == 2
    assert second["params"][0] is added and second["lr"] == 0.5
    assert list(optimizer.state) == [added]


def test_a_schedulers_patch_of_the_optimizer_is_put_back() -> None:
    model, optimizer, _ = make_parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    patched = optimizer.step
    engine = make_engine()
    engine.compose(model, optimizer, lr_scheduler=scheduler)
    assert optimizer.step is not patched
    engine.close()
    assert optimizer.step is patched


def test_closing_lets_go_of_the_folder(tmp_path: Path) -> None:
    model, optimizer, loader = make_parts()
    first = make_engine()
    train(first, model, optimizer, loader)
    first.save_checkpoint(tmp_path)
    first.close()
    second = make_engine()
    second.checkpoints.hold_folder(tmp_path)
    second.close()


def test_an_engine_follows_another_in_the_same_processes() -> None:
    """The last one left the process group, and the next one waited for ranks of the old one."""
    assert run_in_processes(_count_ranks_with_three_engines, 2) == [[3.0, 3.0, 3.0]] * 2


def _count_ranks_with_three_engines() -> list[float]:
    totals = []
    for _ in range(3):
        engine = make_engine()
        totals.append(float(engine.gather(torch.tensor([engine.args.rank + 1.0])).sum()))
        engine.close()
    return totals
