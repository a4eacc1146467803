"""Recomputed activations: the same loss and gradients, bit for bit, on an unchanged model.

Bit for bit with the model *without a key-value cache*, which recompute leaves out: training needs
none, and a block would fill it twice. Hugging Face's generating models fill one in training unless
they are told not to. The values are the same, but joining keys to an empty cache makes them
contiguous, and a BLAS may round products of contiguous and of strided operands differently: Arm's
does, Intel's does not. So a model with a cache is compared up to rounding.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.recompute import blocks as recompute
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import find_plan

from .models import FAMILIES, GENERATING, get_gradients, get_loss, make

FAMILIES = list(FAMILIES)
ROUNDING = 32 * torch.finfo(torch.float32).eps
"""Of a gradient's norm. Measured on Arm: 8 at most; another dropout mask: millions."""

get_gradients_without_cache = functools.partial(get_gradients, has_cache=False)


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        distance = (found[name] - value).norm()
        assert distance <= tolerance * value.norm(), (name, float(distance / value.norm()))


class Counter:
    """How often each block's inside is run."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: list[int] = []
        for index, block in enumerate(find_plan(model).get_blocks(model)):
            self.counts.append(0)
            inner = next(module for module in block.modules() if isinstance(module, nn.LayerNorm))
            inner.register_forward_hook(lambda *_, index=index: self.count(index))

    def count(self, index: int) -> None:
        self.counts[index] += 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_gradients_are_bit_equal(family: str, granularity: str) -> None:
    model = make(family)
    expected = get_gradients_without_cache(model, family)
    apply_recompute(model, find_plan(model), granularity=granularity)
    assert_equal(get_gradients(model, family), expected)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "custom"])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_dropout_is_drawn_once(family: str, granularity: str) -> None:
    model = make(family, dropout=0.3)
    expected = get_gradients_without_cache(model, family)
    state = torch.get_rng_state()
    apply_recompute(model, find_plan(model), granularity=granularity)
    assert_equal(get_gradients(model, family), expected)
    assert torch.equal(torch.get_rng_state(), state), "the random numbers go on as without it"


@pytest.mark.parametrize("family", sorted(GENERATING))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_model_with_a_cache_differs_by_rounding_only(family: str, dropout: float) -> None:
    model = make(family, dropout)
    expected = get_gradients(model, family)
    apply_recompute(model, find_plan(model))
    assert_equal(get_gradients(model, family), expected, ROUNDING)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_another_dropout_mask_is_not_rounding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would miss if their tolerance hid it."""
    forgetful = functools.partial(recompute.checkpoint, preserve_rng_state=False)
    monkeypatch.setattr(recompute, "checkpoint", forgetful)
    model = make(family, dropout=0.3)
    expected = get_gradients(model, family)
    apply_recompute(model, find_plan(model))
    found = get_gradients(model, family)
    with pytest.raises(AssertionError, match="weight"):
        assert_equal(found, expected, 1000 * ROUNDING)


class CountingBlock(nn.Module):
    """Changes its buffers in every pass: in place, by a new tensor, and as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("passes", torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.norm(self.linear(x) * self.passes + self.mean)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_buffers_change_once(granularity: str) -> None:
    """The second pass also starts from what they held in the first one."""
    torch.manual_seed(0)
    plain = nn.Sequential(CountingBlock(), CountingBlock())
    model = copy.deepcopy(plain)
    apply_recompute(model, find_plan(model), granularity=granularity)
    for number, rows in enumerate(torch.randn(3, 5, 4)):
        for each in (plain, model):
            each[1].norm.train(number > 0)  # frozen at first
            each(rows).pow(3).sum().backward()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    gradients = [{n: p.grad for n, p in each.named_parameters()} for each in (model, plain)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_every_nth_block_is_recomputed(interval: int) -> None:
    model = make("bert")
    expected = get_gradients(model, "bert")
    apply_recompute(model, find_plan(model), interval=interval)
    counter = Counter(model)
    assert_equal(get_gradients(model, "bert"), expected)
    assert counter.counts == [2 if index % interval == 0 else 1 for index in range(3)]


def test_nothing_is_recomputed_in_evaluation() -> None:
    model = make("bert")
    apply_recompute(model, find_plan(model))
    counter = Counter(model)
    get_loss(model.eval(), "bert").backward()
    with torch.no_grad():
        get_loss(model.train(), "bert")
    assert counter.counts == [2, 2, 2]


def test_recompute_keeps_less_for_the_backward_pass() -> None:
    def count_saved_bytes(granularity: str | None) -> int:
        model = make("custom")
        if granularity:
            apply_recompute(model, find_plan(model), granularity=granularity)
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            get_loss(model, "custom")
        return sum(kept.values())

    assert count_saved_bytes("full") < count_saved_bytes(None)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_stays_what_it_was(family: str) -> None:
    model = make(family)
    names = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    plan = find_plan(model)
    classes = [type(block) for block in plan.get_blocks(model)]
    apply_recompute(model, plan)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    for block, cls in zip(plan.get_blocks(model), classes, strict=True):
        assert isinstance(block, cls)
        assert type(block).__name__ == cls.__name__
    assert find_plan(model) == plan
    twin = copy.deepcopy(model)
    assert_equal(get_gradients(twin, family), get_gradients(model, family))


def test_users_configuration_is_not_changed_for_good() -> None:
    """Switches change speed and memory only: an exported model still generates with a cache."""
    model = make("gpt2")
    assert model.config.use_cache is True
    apply_recompute(model, find_plan(model))
    assert model.config.to_dict()["use_cache"] is True


def test_model_without_blocks_says_what_to_do() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        ConfigurationError, match=r"no repeated blocks were found in Linear.*rapidf"
    ):
        apply_recompute(model, find_plan(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "granularity"), [("bert", "full"), ("bert", "selective"), ("custom", "full")]
)
def test_together_with_compile(family: str, granularity: str) -> None:
    torch._dynamo.reset()
    model = make(family)
    expected = get_gradients(model, family)
    plan = find_plan(model)
    apply_recompute(model, plan, granularity=granularity)
    apply_compile(model, plan, backend="aot_eager")
    assert_equal(get_gradients(model, family), expected)
