"""fp8 products: close to bf16 as far as 8 bits allow, and everything else as in a bf16 run.

On a CPU the products are emulated: operands are rounded to fp8 and multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.fp8 import layers, product
from rapidformer.accel.fp8.layers import apply_fp8, find_names
from rapidformer.accel.precision.autocast import apply_mixed_precision
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.precision.processor import EMULATE_VARIABLE
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.config import parse_arguments, resolve
from rapidformer.dist.processes import stop_processes
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError
from rapidformer.models.plan import find_plan
from rapidformer.overlay import list_layers
from rapidformer.verification.settings import list_left_out
from tests.parity.models import build_model
from tests.processes import run_in_processes

from .models import get_gradients, get_loss, make, make_batch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_layers_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "SMALLEST", 16)
    monkeypatch.setenv(EMULATE_VARIABLE, "1")
    yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 24)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.classifier = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": self.classifier(hidden).square().mean()}


def switch_on(model: nn.Module, *, is_fp8: bool = True, **others: Any) -> nn.Module:
    """In the order of the rows."""
    plan = find_plan(model)
    if is_fp8:
        apply_fp8(model, plan, fuses_gated=others.get("fuses_gated", False))
    if "recompute" in others:
        apply_recompute(model, plan, granularity=others["recompute"])
    if "backend" in others:
        apply_compile(model, plan, backend=others["backend"])
    return apply_mixed_precision(model, Precision(dtype=torch.bfloat16, reason="bf16"), CPU)


def differentiate(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(2)
    model(torch.randn(16, 16))["loss"].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def measure_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together, relative to their size."""
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == value.dtype for name, value in expected.items())
    pairs = [(found[name] - value, value) for name, value in expected.items()]
    difference, size = (torch.cat([pair[i].flatten() for pair in pairs]).norm() for i in (0, 1))
    return float(difference / size)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loss_and_gradients_are_close_to_those_of_bf16(family: str) -> None:
    """gpt2's layers have transposed weights; 12 rows are not a multiple of 16."""
    plain, small = switch_on(make(family), is_fp8=False), switch_on(make(family))
    expected, found = get_gradients(plain, family), get_gradients(small, family)
    assert 1e-3 < measure_difference(found, expected) < 0.1
    torch.testing.assert_close(get_loss(small, family), get_loss(plain, family), rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)]
)
def test_a_tensor_is_scaled_to_the_range_of_fp8(dtype: torch.dtype, bound: float) -> None:
    for size in (1e-25, 1.0, 1e25):
        tensor = torch.linspace(0.1, 1.0, 64) * size
        small, scale = product.quantize(tensor, dtype)
        assert float(small.float().max()) == torch.finfo(dtype).max
        torch.testing.assert_close(small.float() * scale, tensor, rtol=bound, atol=0)
    small, scale = product.quantize(torch.zeros(4), dtype)
    assert torch.equal(small.float() * scale, torch.zeros(4))


def test_a_value_that_is_not_finite_reaches_the_loss() -> None:
    model = switch_on(Stack())
    for bad in (torch.nan, torch.inf):
        hidden = torch.ones(4, 16)
        hidden[0, 0] = bad
        assert not model(hidden)["loss"].isfinite()


class Conv1D(nn.Linear):
    """Not GPT-2's, whose weight is transposed."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).relu()


def test_only_large_layers_inside_blocks_are_converted() -> None:
    model = Stack()
    for block in model.blocks:
        block.gate = Conv1D(16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert apply_fp8(model, find_plan(model)) == (4, 6)
    converted = [name for name, module in model.named_modules() if "fp8" in list_layers(module)]
    assert converted == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_evaluation_is_that_of_bf16() -> None:
    plain, small = switch_on(Stack(), is_fp8=False), switch_on(Stack())
    rows = torch.randn(3, 16)
    with torch.no_grad():
        assert torch.equal(small(rows)["loss"], plain(rows)["loss"])
    # Also with gradients: unpadding compares the model with itself that way.
    assert not torch.equal(small(rows)["loss"], plain(rows)["loss"])
    assert torch.equal(small.eval()(rows)["loss"], plain.eval()(rows)["loss"])


@pytest.mark.parametrize("others", [{"recompute": "full"}, {"recompute": "selective"},
                                    {"backend": "aot_eager"}])  # fmt: skip
def test_recomputed_and_compiled_blocks_give_the_same_gradients(others: dict[str, str]) -> None:
    plain, switched = Stack(), Stack()
    for block in (*plain.blocks, *switched.blocks):
        block.up.weight.requires_grad_(False)  # a frozen layer keeps less
    expected = differentiate(switch_on(plain))
    found = differentiate(switch_on(switched, **others))
    assert measure_difference(found, expected) < 1e-6


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate, self.up = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.down = nn.Linear(32, 16, bias=False)
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden) * self.activation(self.gate(hidden)))


class GatedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Gated()), nn.Sequential(Gated())])


def test_a_gated_mlp_is_computed_as_a_whole() -> None:
    """Like its layers one by one, but for values in between that are not rounded to bf16."""
    expected = differentiate(switch_on(GatedStack()))
    found = differentiate(switch_on(GatedStack(), fuses_gated=True))
    assert 0 < measure_difference(found, expected) < 0.01
    compiled = differentiate(switch_on(GatedStack(), fuses_gated=True, backend="aot_eager"))
    assert measure_difference(compiled, found) < 1e-6


def test_a_gated_mlp_with_hooks_or_frozen_layers_stays_in_parts() -> None:
    seen = []
    frozen, hooked, expected = (switch_on(GatedStack(), fuses_gated=i < 2) for i in range(3))
    for block in hooked.blocks:
        block[0].activation.register_forward_hook(lambda *_: seen.append(1))
    frozen.blocks[0][0].up.weight.requires_grad_(False)
    frozen.blocks[1][0].up.weight.requires_grad_(False)
    gradients = differentiate(expected)
    assert measure_difference(differentiate(hooked), gradients) == 0
    assert len(seen) == 2
    kept = {name: value for name, value in gradients.items() if "up" not in name}
    assert measure_difference(differentiate(frozen), kept) == 0


def test_a_layer_whose_forward_was_replaced_keeps_its_own() -> None:
    model = GatedStack()
    for block in model.blocks:
        block[0].up.forward = lambda input: 3 * input.repeat(1, 2)
    gradients = differentiate(switch_on(model, fuses_gated=True))
    assert not any("up" in name for name in gradients)
    assert not list_layers(model.blocks[0][0].up) and list_layers(model.blocks[0][0].gate)


class Optional(Gated):
    """Takes a second argument."""

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
        return super().forward(hidden)


class Other(Gated):
    """Has another formula."""

    def __init__(self, formula: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self._formula = formula

    def keep(self, value: Tensor) -> Tensor:
        self.kept = value
        return value

    def forward(self, hidden: Tensor) -> Tensor:
        return self._formula(self, hidden)


@pytest.mark.parametrize(
    "formula",
    [
        lambda m, x: m.down(m.up(x) * functional.gelu(m.gate(x))),
        lambda m, x: m.down(functional.silu(m.up(x) * m.gate(x))),
        lambda m, x: m.down(m.up(x) * functional.silu(m.gate(2 * x))),
        lambda m, x: m.down(m.up(x) * functional.silu(m.gate(x)) * 2),
        lambda m, x: m.down(m.up(x) * functional.silu(m.gate(x))) + x,
        lambda m, x: m.down(m.up(x) * functional.silu(m.up(x))),
        lambda m, x: m.down(m.up(-x if m.training else x) * functional.silu(m.gate(x))),
        lambda m, x: m.down(m.keep(m.up(x)) * functional.silu(m.gate(x))),
        lambda m, x: x if x.sum() > 0 else -x,
    ],
)
def test_only_the_formula_of_a_gated_mlp_is_recognised(formula: Any) -> None:
    module = Other(formula).eval()
    assert find_names(module) is None
    assert not module.training and not hasattr(module, "kept")


def test_a_gated_mlp_is_recognised() -> None:
    written = Other(lambda m, x: m.down(functional.silu(m.gate(x)) * m.up(x)))
    assert find_names(Gated()) == find_names(written) == ("gate", "up", "down")
    assert find_names(Optional()) is None


def test_one_token_and_an_empty_batch() -> None:
    layer = switch_on(Stack()).blocks[0].up
    with torch.autocast("cpu", torch.bfloat16):
        whole = layer(torch.ones(1, 16))
        assert torch.equal(layer(torch.ones(16)), whole[0])
        assert layer(torch.ones(0, 16)).shape == (0, 32)


def test_frozen_layers_under_lora_only_pass_gradients_on() -> None:
    plain = switch_on(build_model("small-gpt2-lora").train(), is_fp8=False)
    small = switch_on(build_model("small-gpt2-lora").train())
    expected, found = get_gradients(plain, "gpt2"), get_gradients(small, "gpt2")
    assert all("lora" in name for name in found)
    assert 1e-3 < measure_difference(found, expected) < 0.1


def train(**settings: Any) -> tuple[dict[str, Tensor], list[str]]:
    """One update of a llama with fp8; its weights, and the start-up lines."""
    engine = RapidformerEngine(
        args={"lr": 1e-2, "train_iters": 9, "micro_batch_size": 1, "device": "cpu", "fp8": True,
              "adam_eps": 1e-3, "log_level": "error", **settings}
    )  # fmt: skip
    model, optimizer, _ = engine.compose(model=make("llama"))
    row = slice(engine.args.rank, engine.args.rank + 1)
    engine.backward(model(**{k: v[row] for k, v in make_batch("llama").items()})["loss"])
    optimizer.step()
    return engine.checkpoints.gather_weights(), engine.model.parallelized.switches


def test_fp8_is_announced_as_a_choice_of_precision() -> None:
    _, (precision, *lines) = train()
    stop_processes()
    assert precision.startswith("precision: bf16")
    assert (
        "fp8: 15 of 21 linear layers in the blocks multiply in fp8 in training (a choice of "
        "precision: results differ from bf16)" in lines
    )


def compare_layouts() -> float | None:
    """On rank 0: the largest difference between the weights of whole and sharded training."""
    torch.set_num_threads(1)
    with mock.patch.object(layers, "SMALLEST", 16):
        whole, _ = train(optimizer_state_dtype="bf16")
        sharded, _ = train(optimizer_state_dtype="bf16", zero_3_memory_optimization=True)
    stop_processes()
    differences = [float((sharded[name] - value).abs().max()) for name, value in whole.items()]
    return max(differences) if differences else None


@pytest.mark.slow
def test_sharded_weights_train_like_whole_ones() -> None:
    """With Adam's moments in bf16 too."""
    difference, _ = run_in_processes(compare_layouts, 2)
    assert difference < 1e-5


def test_verify_leaves_it_out() -> None:
    args = resolve(parse_arguments(["--task", "causal_lm", "--fp8"]))
    assert args.mixed_precision == "bf16"
    assert any(line.startswith("--fp8: fp8 changes") for line in list_left_out(args))


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no block of Stack has a linear layer with at le"
    ):
        monkeypatch.setattr(layers, "SMALLEST", 1024)
        apply_fp8(Stack(), find_plan(Stack()))
    with pytest.raises(
        ConfigurationError, match=r"--fp8 cannot be combined with --(mixed-precision )?fp16"
    ):
        resolve(parse_arguments(["--fp8", "--fp16"]))
    monkeypatch.setenv(EMULATE_VARIABLE, "0")
    with pytest.raises(ConfigurationError, match=r"--fp8: it needs an NVIDIA GPU .* is on a CPU"):
        RapidformerEngine(args=["--fp8", "--device", "cpu", "--log-level", "error"])
