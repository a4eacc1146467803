"""Embedding tables of a few rows: the same gradients from a matrix product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rapidformer.accel.small_tables import apply_small_tables
from rapidformer.overlay import list_layers
from tests.accel.models import get_gradients, get_loss, make


def test_token_types_have_the_same_gradients() -> None:
    model = make("bert")
    loss, expected = get_loss(model, "bert"), get_gradients(model, "bert")
    apply_small_tables(model)
    extended = [name for name, module in model.named_modules() if list_layers(module)]
    assert [name.rpartition(".")[2] for name in extended] == ["token_type_embeddings"]
    assert torch.equal(get_loss(model, "bert"), loss)
    found = get_gradients(model, "bert")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_ids_of_any_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    table, ids = nn.Embedding(3, 4), torch.randint(3, shape)
    weights = torch.randn(*shape, 4)
    (table(ids) * weights).sum().backward()
    expected, table.weight.grad = table.weight.grad, None
    apply_small_tables(table)
    (table(ids) * weights).sum().backward()
    torch.testing.assert_close(table.weight.grad, expected)


def test_gradients_of_each_row_can_be_taken() -> None:
    table, ids = nn.Embedding(3, 4), torch.tensor([[0, 1], [2, 2]])

    def add_up(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torch.func.functional_call(table, {"weight": weight}, (row,))
        return values.sum()

    take = torch.func.vmap(torch.func.grad(add_up), in_dims=(None, 0))
    expected = take(table.weight, ids)
    apply_small_tables(table)
    assert torch.equal(take(table.weight, ids), expected)


def test_a_table_that_does_more_than_look_up_stays_as_it_is() -> None:
    for options in ({"max_norm": 1.0}, {"sparse": True}):
        table = nn.Embedding(3, 4, **options)
        apply_small_tables(table)
        assert type(table) is nn.Embedding
    padded = nn.Embedding(3, 4, padding_idx=0)
    apply_small_tables(padded)
    padded(torch.tensor([0, 1])).sum().backward()
    assert padded.weight.grad is not None and padded.weight.grad[0].eq(0).all()
