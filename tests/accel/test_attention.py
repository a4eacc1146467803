"""``--attention``: what is chosen, what is refused, and T5's bias in a layout that kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend
from transformers import SwinConfig, SwinModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rapidformer.accel.attention.kernel_order import (
    Device,
    apply_bias_layout,
    choose,
    find_obstacle,
)
from rapidformer.accel.attention.kernel_scope import (
    KernelChoice,
    apply_choice,
    choose_for_all_sizes,
    use_kernels,
)
from rapidformer.accel.context.exchanged_attention import find_configs
from rapidformer.compat.transformers_models import get_attention, set_attention
from rapidformer.config import parse_arguments
from rapidformer.config.switches import Situation, get_switch
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError

from .models import get_gradients, get_loss, make

CPU = Device(kind="cpu")
HOPPER = Device(kind="cuda", capability=(9, 0), dtype=torch.bfloat16)
AMPERE = Device(kind="cuda", capability=(8, 0), dtype=torch.bfloat16)
IN_FP32 = Device(kind="cuda", capability=(9, 0))


@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [("auto", CPU, None), ("auto", HOPPER, "cudnn"), ("auto", AMPERE, None),
     ("auto", IN_FP32, None), ("flash", AMPERE, "flash"), ("cudnn", AMPERE, "cudnn"),
     ("sdpa", HOPPER, None)],
)  # fmt: skip
def test_the_kernel_tried_first(asked: str, device: Device, chosen: str | None) -> None:
    assert choose(asked, device) == chosen


@pytest.mark.parametrize(
    ("family", "asked", "reason"),
    [("t5", "flash", "does not take the relative position bias of T5For"),
     ("t5", "flex", "FlexAttention has no dropout"),
     ("custom", "eager", "is not a transformers model")],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_reason(family: str, asked: str, reason: str) -> None:
    assert reason in str(find_obstacle(make(family, dropout=0.1), asked))


@pytest.mark.parametrize(
    ("asked", "place", "reason"),
    [("cudnn", Situation(device="cpu"), "it runs on GPUs, and this run is on CPU"),
     ("flash", Situation(device="cuda", precision="fp32"), "it computes in 16 bits, and this run"),
     ("flex", Situation(device="cpu"), "FlexAttention has no backward pass on CPUs")],
)  # fmt: skip
def test_where_a_kernel_does_not_run(asked: str, place: Situation, reason: str) -> None:
    args = parse_arguments(["--attention", asked])
    obstacle = get_switch("attention").find_obstacle(args, place)
    assert obstacle is not None and obstacle.reason.startswith(reason)


@pytest.mark.parametrize(("family", "asked"), [("bert", "flash"), ("llama", "flex")])
def test_what_can_run_is_not_refused(family: str, asked: str) -> None:
    assert find_obstacle(make(family), asked) is None


def test_cudnn_plans_only_for_lengths_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []

    @contextmanager
    def note(order: list[SDPBackend], *, set_priority: bool) -> Iterator[None]:
        orders.append(order)
        yield

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", note)
    module = nn.Identity()
    apply_choice(module, [], KernelChoice((SDPBackend.MATH,), avoids_plans=True))
    with use_kernels(module):
        orders.clear()
        for queries, keys in ((64, 128), (128, 65), (3, 64)):
            query, key = torch.zeros(1, 2, queries, 8), torch.zeros(1, 2, keys, 8)
            ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, key, None)
            ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Identity(), query, key, key, None)
        assert len(orders) == 2 and orders[0][-2:] == [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        ]
        with choose_for_all_sizes(module):
            assert len(orders) == 3
    with choose_for_all_sizes(nn.Identity()):
        assert len(orders) == 3, "not for other models"


def test_heads_that_are_too_large_are_refused() -> None:
    model: Any = make("llama")
    model.config.head_dim = 256
    assert "heads of up to 128, and LlamaForCausalLM has 256" in str(find_obstacle(model, "cudnn"))
    assert find_obstacle(model, "flash") is None


def test_a_list_of_heads_is_not_a_head_size() -> None:
    config = SwinConfig(image_size=8, patch_size=2, embed_dim=8, depths=[1], num_heads=[2])
    model = SwinModel(config)
    assert find_obstacle(model, "flash") is None


@contextmanager
def composed(asked: str, model: nn.Module) -> Iterator[RapidformerEngine]:
    engine = RapidformerEngine(
        args=["--attention", asked, "--device", "cpu", "--log-level", "error"]
    )
    try:
        engine.model.compose_for_evaluation(model)
        yield engine
    finally:
        engine.close()


def test_eager_reaches_every_part_of_the_model_and_the_start_up_line() -> None:
    model = make("t5")
    with composed("eager", model) as engine:
        assert {get_attention(config) for config in find_configs(model)} == {"eager"}
        assert "attention: eager attention" in engine.model.parallelized.switches
    assert {get_attention(config) for config in find_configs(model)} == {"sdpa"}


def test_a_refusal_stops_the_run() -> None:
    with (
        pytest.raises(
            ConfigurationError, match=r"--attention flash: it runs on GPUs.* Leave the flag out\."
        ),
        composed("flash", make("bert")),
    ):
        raise AssertionError("not reached")


def test_the_bias_of_t5_is_laid_out_for_fused_kernels_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("t5")
    loss, expected = get_loss(model, "t5"), get_gradients(model, "t5")
    steps: list[int] = []
    attend = functional.scaled_dot_product_attention

    def watch(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if attn_mask is not None:
            steps.append(attn_mask.stride(-1))
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watch)
    # transformers 5.22 does it itself: our layout can go with the last version that does not.
    apply_bias_layout(model)
    assert torch.equal(get_loss(model, "t5"), loss)
    assert set(steps) == {1}
    assert_close(get_gradients(model, "t5"), expected)
    for config in find_configs(model):
        set_attention(config, "eager")
    assert_close(get_gradients(model, "t5"), expected)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
