"""BatchNorm under data parallelism: outputs, gradients and running statistics of one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer.engine import RapidformerEngine
from tests.parity.harness import keep_rate, make_sgd, zero
from tests.parity.own_loop import SETTINGS, Loop, assert_same
from tests.parity.own_models import PlainModel
from tests.processes import run_in_kept_processes


class NormalisedModel(PlainModel):
    """BatchNorm over the features of every token, and over whole rows."""

    def __init__(self) -> None:
        super().__init__()
        self.by_token = nn.BatchNorm1d(16)
        self.by_row = nn.BatchNorm1d(16, momentum=None)
        self.plain = nn.BatchNorm1d(16, affine=False, track_running_stats=False)

    def forward(self, input_ids: torch.Tensor, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.by_token(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        rows = self.plain(self.by_row(hidden.mean(1)))
        logits = self.head(hidden + rows[:, None])
        labels = batch["labels"]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return NormalisedModel()


def train(loop: Loop) -> None:
    """Four updates, the last with frozen statistics."""
    for number in range(4):
        if number == 3:
            loop.model.by_token.eval()
            loop.model.by_row.eval()
        loss = loop.compute_loss(number)
        loop.note_mean(loss)
        loop.engine.backward(loss)
        loop.engine.step()
    for norm in (loop.model.by_token, loop.model.by_row):
        loop.values += [*norm.running_mean.tolist(), *norm.running_var.tolist()]
        loop.values.append(float(norm.num_batches_tracked))
    loop.model.eval()
    with torch.no_grad():
        loop.note_mean(loop.compute_loss(9))


def test_batch_norm_equals_one_process() -> None:
    options = {"make_model": make_model}
    assert_same([(train, layout, options) for layout in ({}, zero(1), zero(3))])


def test_accumulation_with_batch_norm_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {**SETTINGS, "log_level": "warning", "micro_batch_size": 2}
    engine = RapidformerEngine(args=settings)
    model = make_model()
    with caplog.at_level("WARNING"):
        engine.compose(model, make_sgd(model), keep_rate)
    assert "BatchNorm takes its statistics over one micro-batch, not over the 4" in caplog.text


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_accumulation_with_spectral_norm_is_reported(
    wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report = "spectral_norm improves its estimate in every forward pass: {} times"
    times = 4 if wrap is nn.utils.spectral_norm else 2  # a message is logged once
    for count in (1, times):
        settings = {**SETTINGS, "log_level": "warning", "micro_batch_size": 8 // count}
        model = PlainModel()
        wrap(model.head)
        assert "spectral_norm" not in caplog.text
        RapidformerEngine(args=settings).compose(model, make_sgd(model), keep_rate)
    assert report.format(times) in caplog.text


def test_fillers_do_not_count() -> None:
    """Six rows over two ranks of two: in the second round, the second rank has none."""
    assert run_in_kept_processes(train_on_six_rows, 1)[0] == pytest.approx(
        run_in_kept_processes(train_on_six_rows, 2)[0], abs=1e-6
    )


def train_on_six_rows() -> list[float]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = RapidformerEngine(
        args={
            "micro_batch_size": 4 // int(os.environ["WORLD_SIZE"]),
            "lr": 0.1,
            "clip_grad": 0.0,
            "log_level": "error",
        }
    )
    rows = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i))} for i in range(6)]
    loader = engine.data.build_loader(rows, is_training=True, shuffle=False)
    engine.compose(model, make_sgd(model), keep_rate)
    for batch in loader:
        # A mean of squares over its rows: each rank's own weight is the number of its rows.
        engine.backward(model(batch["x"]).square().mean(), weight=float(len(batch["x"])))
        engine.step()
    return [*model[1].running_mean.tolist(), *model[0].weight.flatten().tolist()]
