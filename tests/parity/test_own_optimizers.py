"""Optimizers that the user brings: exact on sharded weights, or refused at compose by name."""

from __future__ import annotations

import torch
from torch import nn
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from tests.parity.harness import zero
from tests.parity.own_loop import TENSOR, Loop, Run, assert_same, run_on_ranks


def train(loop: Loop) -> None:
    for number in range(3):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()


def make_muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.transformer.h.parameters() if p.dim() == 2], lr=0.01)


def make_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def make_hugging_face_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return HuggingFaceAdafactor(
        model.parameters(), lr=0.01, relative_step=False, scale_parameter=False
    )


class RowNormalised(torch.optim.Optimizer):
    """A user's own, which looks at the rows of what it is given: its shard."""

    def __init__(self, parameters: object, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                gradient = parameter.grad
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                local.sub_(gradient / gradient.norm(), alpha=group["lr"])


def make_adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01, eps=1e-6)


def make_adadelta(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(model.parameters(), lr=0.1)


def _list_runs(maker: object, *layouts: dict[str, object]) -> list[Run]:
    options = {"model_name": "small-gpt2", "make_optimizer": maker}
    return [(train, layout, options) for layout in layouts]


def test_optimizers_that_work_on_shards_are_exact() -> None:
    runs = _list_runs(make_adagrad, {}, zero(1), zero(3), TENSOR)
    runs += _list_runs(make_adadelta, zero(2), TENSOR)
    # Whole matrices on every rank: what looks at them is exact.
    runs += _list_runs(make_muon, {}) + _list_runs(make_adafactor, {})
    assert_same(runs)


REFUSED = {
    "Muon rounds differently on sharded weights": make_muon,
    "Adafactor fails on sharded weights": make_adafactor,
    "Adafactor fails on sharded weights (aten.add_": make_hugging_face_adafactor,
    "RowNormalised updates a sharded weight unlike": lambda m: RowNormalised(m.parameters()),
}


def test_others_are_refused_by_name_before_training() -> None:
    runs = [run for maker in REFUSED.values() for run in _list_runs(maker, zero(2), TENSOR)]
    outcomes = run_on_ranks(runs)
    for number, words in enumerate(REFUSED):
        for outcome in (o for ranks in outcomes[2 * number : 2 * number + 2] for o in ranks):
            assert outcome.error.startswith(f"ConfigurationError: the optimizer {words}")
            assert "Use AdamW or SGD, or leave those switches out." in outcome.error
