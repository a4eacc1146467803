"""Training under DeepSpeed beside the bare loop; every case in one group of processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer.dist.collectives import sum_over_replicas
from rapidformer.engine import RapidformerEngine
from tests.parity.harness import build_data, build_model, get_order, run_bare

SETTINGS: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "seed": 5,
    "clip_grad": 0.5,
}


@dataclass
class Trace:
    """What a run leaves behind: losses, the first update's gradients, the last weights."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, momentum, and weight decay in one of them."""
    return torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1]},
        ],
        lr=0.1,
        momentum=0.9,
    )


def run_cases(
    folder: Path, cases: dict[str, tuple[str, dict[str, Any]]], epochs: int
) -> dict[str, Trace]:
    """Each case's trace; called in every process."""
    torch.set_num_threads(1)
    traces = {}
    for name, (model_name, content) in cases.items():
        path = folder / f"{name.replace(' ', '-')}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        engine = RapidformerEngine(args={**SETTINGS, "deepspeed": str(path)})
        traces[name] = run_case(engine, model_name, epochs)
    return traces


def run_case(engine: RapidformerEngine, model_name: str, epochs: int) -> Trace:
    model = build_model(model_name)
    loader = engine.build_data_loader(build_data(model_name), shuffle=True)
    model, *_ = engine.compose(
        model,
        make_optimizer(model),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0),
    )
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    model.train()
    for _ in range(epochs):
        for update in engine.iterate_updates(loader):
            results = engine.run_update(lambda batch: model(**batch)["loss"], update)
            loss_sum = sum((r.loss * r.weight for r in results if r.weight), torch.zeros(1))
            gradients = gradients or get_gradients(engine)
            losses.append(
                float(sum_over_replicas(loss_sum, engine.topology) / engine.clock.total_weight)
            )
            engine.step()
    return Trace(losses, gradients, get_weights(engine))


def get_gradients(engine: RapidformerEngine) -> dict[str, Any]:
    """What the coming update uses, whole: before DeepSpeed's own division it is a sum."""
    from deepspeed.utils import safe_get_full_grad

    strategy = engine.parallelized.deepspeed
    assert strategy is not None
    divisor = strategy.engine.optimizer.external_loss_scale if strategy.stage else 1.0
    gradients = {}
    for name, parameter in strategy.model.named_parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            if getattr(parameter, "ds_is_replaced_module", False):
                gradient = gradient.clone()
                parameter.gather_params([gradient])
            gradients[name] = (gradient / divisor).detach().numpy().copy()
    return gradients


def get_weights(engine: RapidformerEngine) -> dict[str, Any]:
    """The model's weights, whole, on the first process (on all of them where nothing is cut)."""
    strategy = engine.parallelized.deepspeed
    assert strategy is not None
    if strategy.state is not None:
        weights = strategy.state.gather_weights()
    else:
        weights = dict(strategy.model.named_parameters())
    return {name: weight.detach().numpy().copy() for name, weight in weights.items()}


def run_one(model_name: str, epochs: int) -> Trace:
    """The bare loop over global batches; tied weights have one name, as under DeepSpeed."""
    model, rows = build_model(model_name), build_data(model_name)
    updates = [[[rows[i] for i in indices]] for indices in get_order(SETTINGS, epochs)]
    bare = run_bare(model, updates, make_optimizer, SETTINGS["clip_grad"])
    names = [name for name, _ in model.named_parameters()]
    return Trace(
        [loss for loss, _ in bare.losses],
        {name: bare.gradients[0][name] for name in names if name in bare.gradients[0]},
        {name: bare.weights[name] for name in names},
    )


def get_difference(mine: Trace, bare: Trace) -> dict[str, float]:
    """The worst relative differences; a gradient that is zero in theory counts against the norm."""
    norm = np.sqrt(sum(float((g**2).sum()) for g in bare.gradients.values()))
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(mine.losses, bare.losses, strict=True)),
        "gradient": _get_worst(mine.gradients, bare.gradients, floor=1e-6 * norm),
        "weight": _get_worst(mine.weights, bare.weights, floor=1e-3),
    }


def _get_worst(mine: dict[str, np.ndarray], bare: dict[str, np.ndarray], *, floor: float) -> float:
    return max(
        float(np.linalg.norm(mine[name] - value)) / max(float(np.linalg.norm(value)), floor)
        for name, value in bare.items()
    )
