"""Linear layers of compiled blocks under autocast: merged where they may be, with equal results."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.compile.merged_linears import Product, merge_linears, multiply
from tests.parity.models import build_model

ROWS = torch.linspace(-1, 1, 2 * 3 * 8).reshape(2, 3, 8).sin()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Query, key and value read one input; the rest does not."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.output = nn.Linear(8, 8)
        self.gate, self.up = nn.Linear(8, 24, bias=False), nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(24, 8, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        mixed = self.query(rows).tanh() * self.key(rows).repeat(1, 1, 2)
        rows = rows + self.output(mixed + self.value(rows).repeat(1, 1, 2))
        return rows + self.down(functional.silu(self.gate(rows)) * self.up(rows))


def compile_merged(function: Any) -> tuple[Any, list[Product]]:
    """The compiled function, and a list that gets its products."""
    products: list[Product] = []

    def backend(graph: Any, _: Any) -> Any:
        merge_linears(graph)
        nodes = graph.graph.nodes
        products.extend(Product(*node.args[3:]) for node in nodes if node.target is multiply)
        return graph

    return torch.compile(function, backend=backend), products


def differentiate(model: nn.Module, call: Any, rows: Tensor = ROWS) -> list[Tensor]:
    rows = rows.clone().requires_grad_()
    model.zero_grad()
    output = call(rows)
    output.double().square().sum().backward()
    found = [output, rows.grad, *(parameter.grad for parameter in model.parameters())]
    return [each.detach().double() for each in found if each is not None]


def measure_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((mine - other).norm() / other.norm()) for mine, other in pairs]


def test_results_are_at_least_as_close_to_exact_ones_as_those_of_autocast() -> None:
    torch.manual_seed(0)
    model = Block()
    exact = differentiate(model.double(), model, ROWS.double())
    model.float()
    compiled, products = compile_merged(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = measure_errors(differentiate(model, model), exact)
        merged = measure_errors(differentiate(model, compiled), exact)
    assert [product.outputs for product in products] == [[8, 4, 4], [8], [24, 24], [8]]
    assert max(merged) < 0.02
    assert sum(merged) <= sum(plain)
    assert all(each.grad.dtype is torch.float32 for each in model.parameters())


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("small-bert", [[16] * 3, [16], [32], [16]]),
        ("small-gpt2", [[48], [16], [64], [16]]),
    ],
)
def test_blocks_of_transformers(name: str, outputs: list[list[int]]) -> None:
    model = build_model(name, 0.0, layers=1)
    block = (model.bert.encoder.layer if name == "small-bert" else model.transformer.h)[0]
    rows = torch.linspace(-3, 3, 2 * 5 * 16).reshape(2, 5, 16).sin()
    call = lambda rows: block(rows)[0] if name != "small-bert" else block(rows)  # noqa: E731
    compiled, products = compile_merged(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, merged = differentiate(block, call, rows), differentiate(block, compiled, rows)
    assert [product.outputs for product in products] == outputs
    assert all(product.is_transposed == (name == "small-gpt2") for product in products)
    assert max(measure_errors(merged[:2], plain[:2])) < 0.02


def test_nothing_changes_without_autocast() -> None:
    model = Block()
    compiled, products = compile_merged(model)
    assert torch.equal(compiled(ROWS), model(ROWS))
    assert not products


def test_layers_outside_autocast_stay() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def call(rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            inside = first(rows)
        return inside, second(rows)

    compiled, products = compile_merged(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, outside = compiled(ROWS)
    assert (inside.dtype, outside.dtype) == (torch.float32, torch.bfloat16)
    assert len(products) == 1


@torch.library.custom_op("rapidformer_tests::double", mutates_args=("rows",))
def double_in_place(rows: Tensor) -> None:
    rows.mul_(2)


def square_in_place(rows: Tensor) -> None:
    rows **= 2


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.mul_(2),
        lambda rows: torch.mul(rows, 2, out=rows),
        nn.ReLU(inplace=True),
        square_in_place,
        double_in_place,
    ],
    ids=["method", "out", "relu", "operator", "custom"],
)
def test_an_input_that_is_changed_in_between_is_not_shared(change: Any) -> None:
    model = Block()

    def call(rows: Tensor) -> Tensor:
        rows = rows.clone()
        first = model.query(rows)
        change(rows)
        return torch.cat([first, model.key(rows)], dim=-1)

    compiled, products = compile_merged(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(ROWS), call(ROWS))
    assert [product.outputs for product in products] == [[8], [4]]


@torch.library.custom_op("rapidformer_tests::fill_from", mutates_args=("weight",))
def fill_from(rows: Tensor, weight: Tensor) -> None:
    weight.fill_(float(rows.sum()))


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(2),
        lambda weight: weight[0].fill_(1),
        lambda weight: weight.diagonal().zero_(),
        lambda weight: torch.mul(ROWS[0], 2, out=weight[:3]),
        lambda weight: fill_from(ROWS, weight),
    ],
    ids=["data", "row", "diagonal", "out", "custom"],
)
def test_a_weight_that_the_block_changes_is_read_after_the_change(change: Any) -> None:
    model = Block()

    def call(rows: Tensor) -> Tensor:
        first = model.query(rows)
        with torch.no_grad():
            change(model.key.weight)
        return torch.cat([first, model.key(rows)], dim=-1)

    before = copy.deepcopy(model.state_dict())
    compiled, _ = compile_merged(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compiled(ROWS)
        model.load_state_dict(before)
        assert torch.equal(found, call(ROWS))


def test_a_layer_that_is_called_twice_gets_both_gradients() -> None:
    layer = nn.Linear(8, 8)

    def call(rows: Tensor) -> Tensor:
        return layer(rows) + layer(layer(rows)) + layer(rows)

    compiled, _ = compile_merged(call)
    exact = differentiate(layer, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differentiate(layer, compiled)
    assert max(measure_errors(found, exact)) < 0.02


def test_frozen_and_16_bit_weights_stay() -> None:
    frozen, trained, small = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()
    frozen.requires_grad_(False)
    compiled, products = compile_merged(lambda rows: frozen(rows) + trained(rows) + small(rows))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(ROWS)
    assert [product.outputs for product in products] == [[8]]


def test_a_layer_without_gradients_takes_none_from_others() -> None:
    model = Block()

    def call(rows: Tensor) -> Tensor:
        with torch.no_grad():
            gate = model.gate(rows).softmax(-1)
        return rows + model.down(model.up(rows) * gate)

    compiled, products = compile_merged(call)
    exact = differentiate(model, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differentiate(model, compiled)
    assert [product.outputs for product in products] == [[24], [24], [8]]
    assert max(measure_errors(found, exact)) < 0.02


def test_layers_that_share_a_bias() -> None:
    first, second, third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    second.bias = third.bias = first.bias
    layers = nn.ModuleList([first, second, third])

    def call(rows: Tensor) -> Tensor:
        return first(rows).tanh() + second(rows) * third(rows)

    compiled, _ = compile_merged(call)
    exact = differentiate(layers, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = differentiate(layers, compiled)
    assert max(measure_errors(found, exact)) < 0.02
