"""Losses over token log-probabilities and divergences: the same under every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.engine import RapidformerEngine
from rapidformer.objectives.divergence import sum_divergences
from rapidformer.objectives.logprobs import get_logits, get_token_logprobs, get_token_scores
from tests.parity.harness import PIPELINE, TENSOR, Training, run_cases, run_on, zero
from tests.parity.limits import LIMITS, check_equal
from tests.parity.models import build_model

ON = {"fused_loss": "on"}
LAYOUTS = (
    {**ON, TENSOR: 2, "sequence_parallel": True}, {**ON, "context_parallel_size": 2},
    {**ON, "dynamic_shape": "on", **zero(3)}, {**ON, PIPELINE: 2}, {"fused_loss": "off", TENSOR: 2},
)  # fmt: skip
Forward = Callable[[dict[str, Tensor]], tuple[Tensor, float]]


def run(engine: RapidformerEngine, loader: Any, forward: Forward) -> None:
    for update in engine.data.iterate_updates(loader):
        engine.run_update(forward, update)
        engine.step()


def prefer(engine: RapidformerEngine, model: nn.Module, loader: Any) -> None:
    """Each micro-batch is a pair, whose first row is the better one; the reference is frozen."""
    reference = build_model("llama", layers=1).eval().requires_grad_(False)
    is_staged = engine.args.pipeline_model_parallel_size > 1

    def forward(batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        batch = dict(batch)
        labels = batch.pop("labels")
        with torch.no_grad():
            known = get_token_logprobs(reference, batch, labels)
            own = None if is_staged else get_token_scores(model, batch, labels)
        logprobs = get_token_logprobs(model, batch, labels, temperature=1.3)
        if own is not None:
            # It says the same of itself without a gradient.
            again = get_token_scores(model, batch, labels)
            for mine, theirs in zip(own, again, strict=True):
                torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)
        better, worse = (logprobs - known).sum(1).unflatten(0, (-1, 2)).unbind(1)
        losses = -functional.logsigmoid(0.1 * (better - worse))
        return losses.mean(), len(losses)

    run(engine, loader, forward)


def distil(engine: RapidformerEngine, model: nn.Module, loader: Any) -> None:
    """From a teacher that every process holds whole; and from itself, which changes nothing."""
    teacher = build_model("llama", layers=1).eval().requires_grad_(False)
    is_staged = engine.args.pipeline_model_parallel_size > 1

    def forward(batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        batch = dict(batch)
        labels = batch.pop("labels")
        with torch.no_grad():
            others = get_logits(teacher, batch, labels)
            own = None if is_staged else get_logits(model, batch, labels)
        logits = get_logits(model, batch, labels)
        sums = sum_divergences(logits, others, labels, beta=0.3, temperature=1.5, label_weight=0.5)
        total, count = sums.loss, int((labels[:, 1:] != -100).sum())
        if own is not None:
            total = total + sum_divergences(logits, own, labels, beta=1.0).loss
        return total / count, count

    run(engine, loader, forward)


def test_under_every_layout_of_two_processes() -> None:
    small = {"rows": 4, "global_batch_size": 4}
    trainings = [Training("llama", run_epoch=each, **small) for each in (prefer, distil)]
    plain = {"fused_loss": "off", "dynamic_shape": "off"}
    references = {training: run_cases([(training, plain)])[0] for training in trainings}
    cases = [(trainings[0], layout) for layout in LAYOUTS]
    cases += [(trainings[1], layout) for layout in LAYOUTS[:3]]
    for (training, settings), traces in zip(cases, run_on(2, cases), strict=True):
        where = f"{training.run_epoch.__name__} under {settings}"
        check_equal(references[training], traces, LIMITS, where=where)
