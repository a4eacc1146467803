"""Mixed precision: 16-bit arithmetic over fp32 weights, and Megatron's rule for the loss scale."""

from __future__ import annotations

import copy
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from rapidformer import RapidformerEngine
from rapidformer.accel.precision.autocast import apply_mixed_precision, keep_fp32_weights
from rapidformer.accel.precision.precision import Precision, choose_precision
from rapidformer.errors import TrainingError
from rapidformer.optim.guard import LossScaler

from .models import get_loss, make, make_batch

CPU = torch.device("cpu")
BF16 = Precision(dtype=torch.bfloat16, reason="test")


def test_choice_on_the_cpu() -> None:
    assert choose_precision(None, CPU).dtype is None
    assert choose_precision("auto", CPU).dtype is torch.bfloat16
    assert choose_precision("bf16", CPU).dtype is torch.bfloat16
    assert choose_precision("fp16", CPU).dtype is torch.float16
    assert not choose_precision("auto", CPU).needs_loss_scaling
    assert choose_precision("fp16", CPU).needs_loss_scaling
    assert "asked for" in choose_precision("fp16", CPU).reason


def test_fp32_leaves_the_model_as_it_is() -> None:
    model = nn.Linear(2, 2)
    apply_mixed_precision(model, Precision(dtype=None, reason="fp32"), CPU)
    assert type(model) is nn.Linear


def test_arithmetic_is_16_bit_and_the_class_stays_a_subclass() -> None:
    model = make("bert")
    names, cls = list(model.state_dict()), type(model)
    seen: list[torch.dtype] = []
    model.get_submodule("bert.encoder.layer.0.intermediate.dense").register_forward_hook(
        lambda *found: seen.append(found[2].dtype)
    )
    apply_mixed_precision(model, BF16, CPU)
    get_loss(model, "bert")
    assert seen == [torch.bfloat16]
    assert isinstance(model, cls)
    assert type(model).__name__ == cls.__name__
    assert list(model.state_dict()) == names


def test_weights_gradients_and_optimizer_state_stay_fp32() -> None:
    model = make("gpt2")
    apply_mixed_precision(model, BF16, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = get_loss(model, "gpt2")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert loss.dtype is torch.float32
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.grad is None or parameter.grad.dtype is torch.float32
        assert all(value.dtype is torch.float32 for value in optimizer.state[parameter].values())


def test_16_bit_weights_become_fp32() -> None:
    model = make("bert").to(torch.bfloat16)
    keep_fp32_weights(SimpleNamespace(model=model, precision=BF16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert get_loss(model, "bert").isfinite()


Pair = namedtuple("Pair", "left right")


class Answering(nn.Module):
    """Returns its 16-bit result in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.form = form

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.form(self.linear(inputs))


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda x: x, lambda y: y),
        (lambda x: (x, "text", x), lambda y: y[2]),
        (lambda x: [x], lambda y: y[0]),
        (lambda x: {"a": {"b": x}}, lambda y: y["a"]["b"]),
        (lambda x: Pair(x, x), lambda y: y.right),
        (lambda x: SequenceClassifierOutput(logits=x, hidden_states=(x,)), lambda y: y.logits),
        (
            lambda x: SequenceClassifierOutput(logits=x, hidden_states=(x,)),
            lambda y: y["hidden_states"][0],
        ),
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple", "output", "output's tuple"],
)
def test_output_without_a_loss_is_fp32(form: Any, read: Any) -> None:
    """The user computes the loss from it: not in 16 bits."""
    model = Answering(form)
    kept = type(model(torch.ones(1, 2)))
    apply_mixed_precision(model, BF16, CPU)
    output = model(torch.ones(1, 2))
    assert type(output) is kept
    assert read(output).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert read(form(model.linear(torch.ones(1, 2)))).dtype is torch.bfloat16


def test_output_with_its_own_loss_is_left_alone() -> None:
    model = make("bert")
    apply_mixed_precision(model, BF16, CPU)
    output = model(**make_batch("bert"))
    assert output.loss.dtype is torch.float32
    assert output.logits.dtype is torch.bfloat16


def test_whole_numbers_are_not_touched() -> None:
    model = Answering(lambda x: (x.argmax(-1), x > 0))
    apply_mixed_precision(model, BF16, CPU)
    indices, flags = model(torch.ones(1, 2))
    assert indices.dtype is torch.int64
    assert flags.dtype is torch.bool


def test_copies_compute_alike() -> None:
    model = make("custom")
    apply_mixed_precision(model, BF16, CPU)
    assert torch.equal(get_loss(copy.deepcopy(model), "custom"), get_loss(model, "custom"))


# ---- the loss scale ----------------------------------------------------------------------------


class MegatronScaler:
    """DynamicGradScaler.update of Megatron-LM v2.6 (megatron/optimizer/grad_scaler.py)."""

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.scale, self.minimum = initial, minimum
        self.window, self.hysteresis = window, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.window:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * 2.0


@settings(max_examples=100, deadline=None)
@given(
    history=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    save_at=st.integers(0, 40),
)
def test_loss_scale_follows_megatrons_rule(
    history: list[bool], window: int, hysteresis: int, save_at: int
) -> None:
    ours = LossScaler(initial=16, minimum=1, window=window, hysteresis=hysteresis)
    theirs = MegatronScaler(16, 1, window, hysteresis)
    for number, overflowed in enumerate(history):
        if number == save_at:  # and a resumed one goes on alike
            resumed = LossScaler(initial=1, minimum=1, window=window, hysteresis=hysteresis)
            resumed.load_state_dict(ours.state_dict())
            ours = resumed
        if overflowed and ours.scale == 1:
            # Where Megatron would skip updates for ever, ours stops: this is no overflow.
            with pytest.raises(TrainingError, match="not finite"):
                ours.update(overflowed=True)
            return
        ours.update(overflowed=overflowed)
        theirs.update(overflowed)
        assert ours.scale == theirs.scale


def test_fixed_scale_never_moves() -> None:
    scaler = LossScaler(fixed=128, window=1, hysteresis=1)
    for overflowed in (True, False, False, True):
        scaler.update(overflowed=overflowed)
        assert scaler.scale == 128


def test_fixed_scale_of_now_wins_over_a_resumed_one() -> None:
    """`--loss-scale 8` said on resuming must hold, whatever the checkpoint had."""
    scaler = LossScaler(fixed=8)
    scaler.load_state_dict(LossScaler(initial=1024).state_dict())
    assert scaler.scale == 8


@torch.no_grad()
def test_files_in_16_bits_stay_so_in_prediction() -> None:
    """The same bits, and the plain model afterwards; trained weights that rounding changes stay."""
    model = make("bert").eval()
    model.bert.encoder.to(torch.bfloat16).float()
    results = []
    for without in (["lean-prediction"], None):
        engine = RapidformerEngine(args={"mixed_precision": "bf16", "without": without})
        engine.model.compose_for_evaluation(model)
        results.append(model(**make_batch("bert")).logits)
        dense = model.bert.encoder.layer[0].intermediate.dense
        kept = {dense.weight.dtype, dense.bias.dtype}
        assert kept == ({torch.float32} if without else {torch.bfloat16})
        assert model.classifier.weight.dtype == torch.float32
        engine.close()
    assert torch.equal(*results)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
