"""Training under DeepSpeed beside the bare loop; every case in one group of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapidformer.dist.collectives import sum_over_replicas
from rapidformer.engine import RapidformerEngine
from rapidformer.models.plan import shifts_labels
from tests.parity.harness import Trace, build_data, build_model

SETTINGS: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "seed": 5,
    "clip_grad": 0.5,
}


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
    is_shifted = shifts_labels(model)
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    model.train()
    for _ in range(epochs):
        loss_sum = torch.zeros(1)
        for batch in loader:
            loss = model(**batch)["loss"]
            weight = loader.info.shifted_labels if is_shifted else loader.info.labels
            engine.backward(loss, weight)
            if weight:
                loss_sum += loss.detach() * weight
            if not loader.is_update_end:
                continue
            gradients = gradients or get_gradients(engine)
            losses.append(float(sum_over_replicas(loss_sum) / engine.clock.total_weight))
            loss_sum = torch.zeros(1)
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
