"""Small models cut into stages, beside the same models in one process.

Each process holds some of the parameters; their gradients and weights are put together by name, and
a name that several processes hold must be equal on all of them. Rows are of odd lengths, so that
every micro-batch has another shape, and the last update of an epoch is a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer.engine import RapidformerEngine
from rapidformer.models.plan import shifts_labels
from tests.parity import models
from tests.parity.harness import build_data, collate, count_labels, cut_updates, run_bare
from tests.parity.tensor_harness import (
    SETTINGS,
    Trace,
    count_bytes,
    find_ties,
    get_gradients,
    get_weights,
    make_sgd,
)

ROWS = 8
EPOCHS = 2
PIPELINE = "pipeline_model_parallel_size"
STAGED = (
    "llama", "qwen3", "mistral", "gpt2", "bert", "bert-mlm", "gpt", "gpt2-frozen", "custom",
    "shared-bias",
)  # fmt: skip
"""The models that are cut into stages."""


def build_model(name: str, layers: int, dropout: float = 0.0) -> nn.Module:
    return models.build_model(name, dropout, layers)


def run_one(name: str, layers: int, epochs: int = EPOCHS) -> Trace:
    """The bare loop over whole global batches; of its gradients, those of the first update."""
    updates = cut_updates(build_data(name), ROWS) * epochs
    trace = Trace.from_bare(run_bare(build_model(name, layers), updates, make_sgd))
    return replace(trace, recorded=None)


def run_staged(cases: list[tuple[str, int, dict[str, Any]]], epochs: int = EPOCHS) -> list[Trace]:
    """The same through the engine; called in every process. One trace per case."""
    traces = []
    for name, layers, settings in cases:
        given = {**SETTINGS, "keep_last": True, **settings}
        engine = RapidformerEngine(args=given)
        model = build_model(name, layers)
        loader = engine.build_data_loader(
            build_data(name), collate, shuffle=False, is_training=True
        )
        engine.compose(model, make_sgd(model), constant)
        traces.append(train(engine, model, loader, epochs))
    engine.close()
    return traces


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def make_forward(model: Any) -> Callable[[Any], Any]:
    is_shifted = shifts_labels(model) or "GPT" in type(model).__name__

    def forward(batch: Any) -> tuple[torch.Tensor, float]:
        labels = batch["labels"]
        loss = model(**batch)["loss"]
        return loss, count_labels(labels, is_shifted=is_shifted and labels.dim() > 1)

    return forward


def train(engine: RapidformerEngine, model: nn.Module, loader: Any, epochs: int) -> Trace:
    trace, forward = Trace(), make_forward(model)
    model.train()
    for _ in range(epochs):
        for update in engine.iterate_updates(loader):
            results = engine.run_update(forward, update)
            total = sum(r.loss.double() * r.weight for r in results if r.weight)
            total = torch.as_tensor(total, dtype=torch.float64)
            group = engine.topology.get_replica_group()
            if group is not None:
                torch.distributed.all_reduce(total, group=group)
            trace.losses.append(float(total / engine.clock.total_weight))
            trace.norms.append(float(engine.clock.grad_norm))
            if len(trace.losses) == 1:  # on every stage, those that learn nothing too
                trace.gradients = get_gradients(model)
            engine.step()
    engine.parallelized.settle()
    trace.weights, trace.ties = get_weights(model), find_ties(model)
    trace.parameter_bytes = count_bytes(model)
    return trace


def join(traces: list[Trace], *, is_bit_equal: bool = True) -> Trace:
    """What all processes hold together; copies must be equal.

    Bit for bit, but where layers are split: sums over processes round differently on each.
    """
    tolerance = 0.0 if is_bit_equal else 1e-5
    joined = Trace(losses=traces[0].losses, norms=traces[0].norms)
    for trace in traces:
        assert np.allclose(trace.losses, joined.losses, rtol=tolerance, atol=0)
        assert np.allclose(trace.norms, joined.norms, rtol=tolerance, atol=0)
        for mine, all_of_them in (
            (trace.gradients, joined.gradients),
            (trace.weights, joined.weights),
        ):
            for key, value in mine.items():
                held = all_of_them.setdefault(key, value)
                distance = np.linalg.norm(held - value)
                assert distance <= tolerance * max(float(np.linalg.norm(held)), 1e-3), key
        joined.parameter_bytes = max(joined.parameter_bytes, trace.parameter_bytes)
        joined.ties |= trace.ties
    return joined
