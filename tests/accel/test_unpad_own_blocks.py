"""Blocks with code of the user's own: trained without padding only if that stays exact."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from rapidformer import RapidformerEngine
from rapidformer.accel.cuda_graph.columns import find_filling
from rapidformer.accel.cuda_graph.filling import prove_filling
from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.proof import find_difference
from rapidformer.accel.unpad.rows import Rows
from rapidformer.accel.unpad.stirring import keep_state, stir
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.compat.torch_dispatch import TorchDispatchMode
from rapidformer.log import warn_once
from rapidformer.models.plan import find_plan
from rapidformer.overlay import find_fact

_HEIGHT = 16
Change = Callable[[Any], None]


class Mixing(nn.Module):
    """Adds the mean over a row's tokens, padding included, as far as a gate is open."""

    def __init__(self, start: float = 0.0, *, is_trained: bool = True) -> None:
        super().__init__()
        gate = torch.full((_HEIGHT,), start)
        self.gate = nn.Parameter(gate) if is_trained else nn.Buffer(gate)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * hidden.mean(1, keepdim=True)


class Flattened(Mixing):
    """Its gate is closed by a sigmoid, which is far from zero."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate.sigmoid() * hidden.mean(1, keepdim=True)


class Gate(nn.Module):
    """Mixes no tokens, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(_HEIGHT))
        self.strength = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * hidden.tanh() * self.strength


class Numbered(nn.Module):
    """Mixes tokens once a number says so."""

    strength = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.strength:
            return hidden
        return hidden + self.strength * hidden.mean(1, keepdim=True)


class Quantized(nn.Module):
    """Rounds to steps of the largest number in the batch, which is rarely one of padding."""

    def forward(self, hidden: Tensor) -> Tensor:
        step = hidden.detach().abs().max() / 1000
        return hidden + ((hidden / step).round() * step - hidden).detach()


class Observed(nn.Module):
    """Keeps a mean over tokens that only evaluation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(_HEIGHT))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
            return hidden
        return hidden - self.mean


class InFloat32(nn.Module):
    """Mixes tokens in fp32 alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(1, keepdim=True) if hidden.dtype == torch.float32 else hidden


class Turning(nn.Module):
    """Mixes tokens, and cannot compute in fp64: its matrix is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.eye(_HEIGHT)

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden + hidden.mean(1, keepdim=True)) @ self.matrix


class InTraining(nn.Module):
    """Mixes tokens in training alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(1, keepdim=True) if self.training else hidden


class InEvaluation(InTraining):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.training else hidden - hidden.mean(1, keepdim=True)


class Counting(nn.Module):
    """What it will do cannot be known from the numbers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden + hidden.mean(1, keepdim=True) if self.calls > 20 else hidden


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_HEIGHT)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.mT).mT


class DropPath(nn.Module):
    """Stochastic depth: a coin for each row."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.dropout:
            return hidden
        kept = hidden.new_empty(hidden.shape[0], 1, 1).bernoulli_(1 - self.dropout)
        return hidden * kept / (1 - self.dropout)


class Noise(nn.Module):
    """Noise for each token: as much without padding."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rand_like(hidden).add(0.5) if self.training else hidden


def build(layers: int = 3, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=_HEIGHT, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config).train()


def put(model: Any, layer: int, module: nn.Module) -> None:
    output = model.bert.encoder.layer[layer].output
    output.LayerNorm = nn.Sequential(output.LayerNorm, module)


def get(model: Any, layer: int) -> Any:
    return model.bert.encoder.layer[layer].output.LayerNorm[1]


def make_batches(count: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(12) < torch.tensor([12, 5, 8, 3])[:, None]
    for _ in range(count):
        ids = torch.randint(1, 50, (4, 12), generator=generator) * mask
        labels = torch.randint(0, 2, (4,), generator=generator)
        yield {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def compose(model: Any) -> tuple[RapidformerEngine, Any, Any]:
    args = {
        "lr": 0.5, "device": "cpu", "log_level": "warning", "clip_grad": 0.0, "optimizer": "sgd",
        "sgd_momentum": 0.0, "weight_decay": 0.0,
    }  # fmt: skip
    engine = RapidformerEngine(args=args)
    composed, optimizer, _ = engine.compose(model=model)
    return engine, composed, optimizer


def lacks_padding(model: Any) -> bool:
    return find_fact(model, Removal) is not None


def train(
    model: Any,
    optimizer: Any,
    before_update: Callable[[Any, int], None],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> list[float]:
    losses = []
    for number, batch in enumerate(make_batches(4), 1):
        before_update(model, number)
        torch.manual_seed(number)
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check(plain: Any, before_update: Callable[[Any, int], None] = lambda *_: None) -> Any:
    """Four updates like a bare loop's; returns the model that an engine has trained."""
    engine, mine, optimizer = compose(copy.deepcopy(plain))
    bare = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = train(plain, bare, before_update)
    found = train(mine, optimizer, before_update, engine.backward)
    assert found == pytest.approx(expected, rel=1e-5)
    others = dict(mine.named_parameters())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-6, msg=name)
    return mine


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    "make",
    [
        Mixing,
        lambda: Mixing(1e-6),
        lambda: Mixing(1.0),
        lambda: Mixing(is_trained=False),
        lambda: Flattened(-12.0),
        InFloat32,
        InTraining,
        BatchNorm,
        Counting,
        Quantized,
        Observed,
    ],
)
def test_blocks_that_mix_tokens_keep_their_padding(
    make: Callable[[], nn.Module], layer: int
) -> None:
    model = build()
    put(model, layer, make())
    assert not lacks_padding(check(model))


def test_a_frozen_weight_is_no_statistic() -> None:
    """The trial gives it a gradient, since it may be trained later."""
    model = build()
    put(model, 1, Gate())
    get(model, 1).requires_grad_(False)
    assert lacks_padding(check(model))


@pytest.mark.parametrize("layer", [1, 2])
def test_a_gate_that_opens_later(layer: int) -> None:
    def open_gate(model: Any, number: int) -> None:
        if number == 3:
            get(model, layer).gate.data.fill_(0.5)

    for is_trained in (True, False):
        model = build()
        put(model, layer, Mixing(is_trained=is_trained))
        assert not lacks_padding(check(model, open_gate))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_frozen_block_that_is_trained_later(layer: int) -> None:
    def unfreeze(model: Any, number: int) -> None:
        model.bert.encoder.layer[layer].requires_grad_(number > 1)

    model = build()
    put(model, layer, Mixing())
    model.bert.encoder.layer[layer].requires_grad_(False)
    plain = copy.deepcopy(model)
    _, mine, _ = compose(model)
    assert not lacks_padding(mine)
    for number, batch in enumerate(make_batches(3), 1):
        for each in (plain, mine):
            unfreeze(each, number)
            each.zero_grad()
            each(**batch).loss.backward()
        for name, weight in plain.named_parameters():
            gradient = mine.get_parameter(name).grad
            torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_a_number_that_code_in_blocks_reads(caplog: pytest.LogCaptureFixture) -> None:
    """Padding is kept while it differs from the one that was tried."""
    warn_once.cache_clear()
    model = build()
    put(model, 1, Numbered())

    def change(model: Any, number: int) -> None:
        get(model, 1).strength = 0.5 if number == 3 else 0.0

    mine = check(model, change)
    assert lacks_padding(mine)
    shapes: list[Any] = []

    def look(module: Any, args: Any, output: Any) -> None:
        shapes.append(tuple(output.shape[:2]))

    look.only_looks = True
    get(mine, 1).register_forward_hook(look)
    for number in (1, 3, 4):
        change(mine, number)
        mine(**next(make_batches(1)))
    assert shapes == [(1, 28), (4, 12), (1, 28)]
    assert "code in the model's blocks reads self.strength, which has changed" in caplog.text


def test_evaluation_is_compared_as_well() -> None:
    model = build()
    put(model, 1, InEvaluation())
    _, mine, _ = compose(copy.deepcopy(model))
    assert not lacks_padding(mine)


def test_code_that_mixes_no_tokens_needs_no_padding() -> None:
    """Dropout and noise for each token do not hinder it."""
    model = build(dropout=0.1)
    put(model, 0, Gate())
    put(model, 2, Noise())
    _, mine, _ = compose(model)
    assert lacks_padding(mine)
    model = build()
    put(model, 1, Gate())
    assert lacks_padding(check(model))


class Coins(TorchDispatchMode):
    """Counts what is drawn at once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "bernoulli" in str(func):
            self.counts.append(result.numel())
        return result


def test_stochastic_depth_has_a_coin_for_each_row() -> None:
    model = build()
    for layer in range(3):
        put(model, layer, DropPath(0.5))
    engine, mine, _ = compose(copy.deepcopy(model))
    with Coins() as coins:
        mine(**next(make_batches(1)))
    assert coins.counts == [4, 4, 4]
    assert "draws random numbers for each row" in engine.explain()
    check(model)


def test_stochastic_depth_that_begins_later() -> None:
    model = build()
    put(model, 1, DropPath(0.0))

    def change(model: Any, number: int) -> None:
        get(model, 1).dropout = 0.25 * (number > 1)

    assert lacks_padding(check(model, change))


def test_a_trial_leaves_no_trace() -> None:
    """Weights, buffers, counters, modes and random numbers are as before, bit by bit."""
    model = build(dropout=0.1)
    put(model, 0, BatchNorm())
    put(model, 1, Counting())
    put(model, 2, Mixing())
    model.bert.encoder.layer[1].eval()
    frozen = model.bert.encoder.layer[2].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert apply_unpadding(model, find_plan(model)) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert get(model, 1).calls == 0
    assert not any(p.requires_grad for p in frozen.parameters())
    assert model.bert.encoder.layer[0].output.dropout.p == 0.1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_rounding_next_to_a_kink_is_no_difference() -> None:
    """ReLU's gradient of a number next to zero is all or nothing, as rounding has it."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, hidden_act="relu", max_position_embeddings=32,
        )
    )  # fmt: skip
    dense = model.bert.encoder.layer[0].intermediate.dense
    nn.init.zeros_(dense.weight[0].detach())

    def call(batch: dict[str, Tensor], *, rounding: float) -> Any:
        dense.bias.data[0] += rounding
        return model(**batch)

    plan = find_plan(model)
    for rounding, difference in ((1e-8, None), (0.1, "logits differ")):
        found = find_difference(model, plan, functools.partial(call, rounding=rounding))
        assert found == difference


def test_a_difference_stands_where_fp64_fails() -> None:
    model = build()
    put(model, 1, Turning())
    assert "(logits differ)" in str(apply_unpadding(model, find_plan(model)))


@pytest.mark.parametrize("is_right", [True, False])
def test_added_tokens_are_tried_without_padding(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens in the wrong rows, a trial that reads padding would compare padded passes."""
    config = build().config
    model = BertForTokenClassification(config)
    plan, read = find_plan(model), Rows.read_filled
    assert apply_unpadding(model, plan) is None

    def misread(real: Any) -> Rows:
        rows = read(real)
        return rows if is_right else dataclasses.replace(rows, places=rows.places.flip(0))

    monkeypatch.setattr(Rows, "read_filled", misread)
    prove_filling(model, plan, None)
    assert find_filling(model).fills == is_right


def test_weights_that_hide_something_are_others_for_a_while() -> None:
    model = build()
    put(model, 1, Mixing())
    model.classifier.weight.data.zero_()
    names = {"bert.encoder.layer.1.output.LayerNorm.1.gate", "classifier.weight"}
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with keep_state(model), stir(model):
        stirred = {n for n, w in model.named_parameters() if not torch.equal(w, before[n])}
        assert stirred == names
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), name


class Remembering(nn.Module):
    """Changes what it holds in every pass of training; its mask was expanded from one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(_HEIGHT))
        self.average = nn.Parameter(torch.ones(_HEIGHT), requires_grad=False)
        self.register_buffer("ones", torch.ones(1).expand(_HEIGHT))
        self.register_buffer("first", None)
        self.mean: Tensor | None = None
        self.seen: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9)
            self.first = self.mean = hidden.mean().detach()
            self.seen.append(1)
        return hidden * self.ones + self.gate


def test_a_trial_leaves_nothing_behind() -> None:
    model = build()
    part = model.bert.encoder.layer[0].output.LayerNorm = Remembering()
    apply_unpadding(model, find_plan(model))
    assert not part.gate.any()
    assert (part.average == 1).all()
    assert (part.mean, part.first, part.seen) == (None, None, [])
    with pytest.raises(RuntimeError, match="in the middle"), keep_state(model), stir(model):
        part(torch.ones(1, 2, _HEIGHT))
        raise RuntimeError("in the middle")
    assert not part.gate.any()
    assert (part.average == 1).all()
    assert (part.mean, part.first, part.seen) == (None, None, [])
