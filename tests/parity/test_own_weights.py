"""Weights and gradients in users' own code: hooks, items that are set, own autograd functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rapidformer import RapidformerEngine
from tests.parity.harness import zero
from tests.parity.models import build_model
from tests.parity.own_loop import TENSOR, Loop, assert_same, run_case
from tests.processes import run_in_kept_processes

GPT2 = {"model_name": "small-gpt2"}
SPLIT = [zero(1), zero(3), TENSOR]
ROWS_MASK = (torch.arange(64) % 3 > 0).float()[:, None]


# ---- hooks ---------------------------------------------------------------------------------------


def make_hooked_model() -> nn.Module:
    """With hooks on a split, a fused and a whole weight, from before ``compose``."""
    model: Any = build_model("small-gpt2")
    block = model.transformer.h[0]
    for weight in (model.transformer.wte.weight, block.attn.c_attn.weight, block.ln_1.weight):
        weight.register_hook(lambda gradient: gradient * 0.25)
    model.transformer.ln_f.bias.register_hook(lambda gradient: gradient * 0.0).remove()
    return model


def train_with_hooks(loop: Loop) -> None:
    seen: list[torch.Size] = []
    weight = loop.model.transformer.wte.weight
    handles = [weight.register_hook(lambda gradient: gradient * ROWS_MASK)]
    handles.append(weight.register_hook(lambda gradient: seen.append(gradient.shape)))
    for number in range(3):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()
        if number == 1:
            for handle in handles:
                handle.remove()
    assert seen == [torch.Size([64, 16])] * 2


def test_hooks_on_parameters() -> None:
    """They had no effect under ZeRO, nor those of before under tensor parallelism."""
    options = {"make_model": make_hooked_model}
    assert_same([(train_with_hooks, layout, options) for layout in ({}, *SPLIT)])


def clip_by_hook(loop: Loop) -> None:
    loop.model.head.weight.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
    loop.model.head.bias.register_hook(lambda gradient: gradient * 0.5)
    loop.engine.backward(loop.compute_loss(0))


@pytest.mark.parametrize(("micro_batch_size", "warns"), [(4, True), (8, False)])
def test_a_hook_that_is_not_linear_is_warned_about(
    micro_batch_size: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"micro_batch_size": micro_batch_size, "log_level": "warning"}
    assert not run_case(clip_by_hook, settings).error
    assert ("a hook on a parameter's gradient is not linear" in caplog.text) == warns


def halve_in_place(loop: Loop) -> None:
    loop.model.head.weight.register_hook(lambda gradient: gradient.mul_(0.5))
    loop.engine.backward(loop.compute_loss(0))


def test_a_hook_that_works_in_place_is_not_tried_on_its_own_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was called not linear: the second gradient was already halved."""
    settings = {"micro_batch_size": 4, "log_level": "warning"}
    assert not run_case(halve_in_place, settings).error
    assert "is not linear" not in caplog.text


def draw_in_hook(loop: Loop) -> None:
    def add_noise(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)

    weight = loop.model.head.weight
    weight.register_hook(add_noise)
    loss = loop.compute_loss(0)
    torch.manual_seed(0)
    torch.randn_like(weight)
    expected = torch.rand(3)
    torch.manual_seed(0)
    loop.engine.backward(loss)
    assert torch.equal(torch.rand(3), expected)
    assert list(weight._backward_hooks.values()) == [add_noise]


def test_trying_a_hook_leaves_its_random_numbers_and_the_hook_as_they_were() -> None:
    """It drew once more than in a bare loop, and stayed wrapped after ``engine.close()``."""
    settings = {"micro_batch_size": 4, "log_level": "warning"}
    assert not run_case(draw_in_hook, settings).error


def count_in_hook(loop: Loop) -> None:
    calls: list[float] = []

    def halve_and_note(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(float(gradient.abs().max()))
        return gradient * 0.5

    loop.model.head.weight.register_hook(halve_and_note)
    loop.engine.backward(loop.compute_loss(0))
    assert len(calls) == 1


def test_a_hook_that_keeps_something_is_not_called_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It saw a gradient that was none, 2 ** 20 times as large."""
    settings = {"micro_batch_size": 4, "log_level": "warning"}
    assert not run_case(count_in_hook, settings).error
    assert "may not be linear (it keeps values, so it is not tried)" in caplog.text


# ---- items and functions -------------------------------------------------------------------------


def set_items(loop: Loop) -> None:
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        weight = loop.model.transformer.wte.weight
        weight.grad[:10] = 0
        weight.grad[40:, 3] = torch.linspace(0, 1, 24)
        weight.grad[ROWS_MASK.bool().expand(64, 16)] = 0.5
        loop.model.transformer.h[0].attn.c_attn.weight.grad[:, 5:20] = 0
        loop.model.transformer.h[0].ln_1.weight.grad[-1] = 2.0
        loop.engine.step()
        with torch.no_grad():
            loop.model.transformer.wpe.weight[1:3] = 0.25
            weight[7:9, 2] = 0.5


def test_items_of_split_gradients_and_weights_can_be_set() -> None:
    assert_same([(set_items, layout, GPT2) for layout in SPLIT])


def change_items(loop: Loop) -> None:
    """By views and by masks, which are whole tensors."""
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        block = loop.model.transformer.h[0]
        weight, fused = loop.model.transformer.wte.weight, block.attn.c_attn.weight
        weight.grad[:10].zero_()
        weight.grad[20:30][1::2].t().mul_(torch.arange(5.0))
        weight.grad[40:, 3] *= 0.25
        assert float(weight.grad[:10].abs().sum()) == 0.0
        weight.grad.mul_(ROWS_MASK)
        fused.grad[:, 5:20].clamp_(min=0.0)
        fused.grad = fused.grad * torch.linspace(0, 1, 48)
        block.ln_1.weight.grad += torch.linspace(0, 1, 16)
        loop.engine.step()
        with torch.no_grad():
            weight.mul_(ROWS_MASK)
            weight[50].fill_(0.125)


def test_split_gradients_and_weights_can_be_changed_by_views_and_masks() -> None:
    """A view was a copy, so nothing happened; a mask was refused by torch."""
    assert_same([(change_items, layout, GPT2) for layout in SPLIT])


class Product(torch.autograd.Function):
    """As users write it, for plain tensors."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)


def use_own_function(loop: Loop) -> None:
    for number in range(2):
        batch = loop.get_batch(number)
        hidden = loop.model.transformer(input_ids=batch["input_ids"])[0]
        logits = Product.apply(hidden, loop.model.transformer.wte.weight)
        labels = batch["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
        loop.engine.backward(loss, weight=len(hidden))
        loop.engine.step()


def test_an_own_autograd_function_takes_a_split_weight() -> None:
    assert_same([(use_own_function, layout, GPT2) for layout in SPLIT])


# ---- rows of other ranks -------------------------------------------------------------------------


def contrast(loop: Loop) -> None:
    """In-batch negatives: every row's first tokens against the last ones of all rows."""
    for number in range(3):
        batch = loop.get_batch(number)
        hidden = loop.model.embedding(batch["input_ids"])
        for layer in loop.model.layers:
            hidden = layer(hidden)
        queries, keys = hidden[:, :3].mean(1), hidden[:, 3:].mean(1)
        everyone = loop.engine.gather(keys)
        topology = loop.engine.runtime.topology
        first = topology.get_rank("data") * len(keys)
        mine = torch.arange(first, first + len(keys))
        loss = nn.functional.cross_entropy(queries @ everyone.t(), mine)
        loop.note_mean(loss)
        loop.engine.backward(loss, weight=len(keys))
        loop.engine.step()


def contrast_within(loop: Loop) -> None:
    """The same without the rows of other micro-batches, one time gathered and one time not."""
    hidden = loop.model.embedding(loop.get_batch(0)["input_ids"])
    for layer in loop.model.layers:
        hidden = layer(hidden)
    keys = hidden[:, 3:].mean(1)
    scores = hidden[:, :3].mean(1) @ keys.t()
    loop.engine.backward(nn.functional.cross_entropy(scores, torch.arange(len(keys))))
    loop.engine.gather(keys)


@pytest.mark.parametrize(("micro_batch_size", "warns"), [(8, False), (4, True)])
def test_in_batch_losses_under_accumulation_are_warned_about(
    micro_batch_size: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They name the objective that does it right; a loss over tokens is none of them."""
    rounds = 8 // micro_batch_size

    def train(loop: Loop) -> None:
        loop.engine.updates.clock.rounds_per_update = rounds
        loop.engine.backward(loop.compute_loss(0))
        loop.engine.step()
        assert "in-batch negatives" not in caplog.text
        contrast_within(loop)

    assert not run_case(train, {"log_level": "warning"}).error
    for text in ("the loss compares the rows of a micro-batch", "engine.gather() in a loss joins"):
        assert (text in caplog.text) == warns
    assert ("rapidformer.objectives.Objective with has_first_pass" in caplog.text) == warns


def test_gathered_rows_have_a_gradient() -> None:
    """``engine.gather`` in a loss cut it off without a word."""
    assert_same([(contrast, {}, {})])


def gather_frozen_rows() -> float:
    engine = RapidformerEngine(args={"device": "cpu", "log_level": "error"})
    rows = torch.ones(2, 3, requires_grad=engine.is_main)
    engine.gather(rows).sum().backward()
    return 0.0 if rows.grad is None else float(rows.grad.sum())


def test_ranks_may_differ_in_what_has_a_gradient() -> None:
    """The first rank's backward pass waited for one that the other did not have."""
    assert run_in_kept_processes(gather_frozen_rows, 2) == [2 * 6, 0]
