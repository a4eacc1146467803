"""Dropout of unpadded rows on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from rapidformer import RapidformerEngine
from rapidformer.accel.unpad import dropout
from rapidformer.accel.unpad.dropout import drop


@pytest.mark.parametrize("rate", [0.1, 0.5, 1e-9, 1 - 1e-9])
def test_rate_and_scale(rate: float) -> None:
    torch.manual_seed(0)
    ones = torch.ones(1000, 999, requires_grad=True)
    output = drop(ones, rate)
    output.sum().backward()
    is_kept = output.detach() != 0
    assert float(is_kept.double().mean()) == pytest.approx(1 - rate, abs=2e-3)
    assert ones.grad is not None and torch.equal(ones.grad, output.detach())
    if rate < 0.9:
        assert float(output.detach().double().mean()) == pytest.approx(1.0, abs=5e-3)
    # Neighbours share a word.
    first, second = is_kept.flatten()[:-1].double(), is_kept.flatten()[1:].double()
    both = float((first * second).mean()) - float(first.mean()) * float(second.mean())
    assert abs(both) < 1e-3


def test_a_dropped_nan_stays_one() -> None:
    assert drop(torch.full((64,), float("nan")), 0.5).isnan().all()


def train(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[int, list[Any]]:
    """How often blocks dropped something by bits, and all gradients."""
    calls: list[float] = []

    def count(tensor: torch.Tensor, rate: float) -> torch.Tensor:
        calls.append(rate)
        return drop(tensor, rate)

    monkeypatch.setattr(dropout, "drop", count)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, hidden_dropout_prob=0.2, max_position_embeddings=64,
    )  # fmt: skip
    engine = RapidformerEngine(args={"micro_batch_size": 4, "lr": 0.1, **settings})
    model, *_ = engine.compose(BertForSequenceClassification(config))
    torch.manual_seed(1)
    mask = torch.arange(40) < torch.tensor([[40], [9], [3], [12]])
    ids = torch.where(mask, torch.randint(5, 60, mask.shape), 0)
    loss = model(input_ids=ids, attention_mask=mask.long(), labels=torch.tensor([0, 1, 0, 1])).loss
    engine.backward(loss)
    return len(calls), [p.grad for p in model.parameters()]


def test_blocks_drop_by_bits_only_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = functional.dropout
    assert train(monkeypatch)[0] == 4  # two in each block
    assert train(monkeypatch, dynamic_shape="off")[0] == 0
    assert functional.dropout is plain


def test_recomputed_blocks_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gradients = train(monkeypatch)
    again, recomputed = train(monkeypatch, checkpoint_activations=True)
    assert again == 2 * calls
    for mine, theirs in zip(recomputed, gradients, strict=True):
        assert torch.equal(mine, theirs)
