"""Dropout of compiled blocks by a hash of each element's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.compile.hashed_dropout import drop, hash_dropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_every_element_is_kept_with_the_same_probability_and_scaled(rate: float) -> None:
    torch.manual_seed(0)
    rows = torch.ones(1000, 2, 64, requires_grad=True)
    dropped = drop(rows, rate)
    dropped.sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, dropped.detach())
    scale = 1 / (1 - rate)
    assert torch.allclose(dropped[dropped != 0], torch.tensor(scale))
    is_kept = (dropped != 0).double()
    deviation = (rate * (1 - rate) / 2000) ** 0.5
    assert (is_kept.mean((0, 1)) - (1 - rate)).abs().max() < 5 * deviation
    again = (drop(rows, rate) != 0).double()
    together = ((is_kept - is_kept.mean()) * (again - again.mean())).mean() / (rate * (1 - rate))
    assert together.abs() < 5 / is_kept.numel() ** 0.5


def test_a_rate_just_below_one_drops_everything() -> None:
    assert not drop(torch.ones(8, 8), 1 - 1e-12).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_stay_visible_in_both_passes(dtype: torch.dtype) -> None:
    rows = torch.full((8, 8), torch.nan, dtype=dtype, requires_grad=True)
    dropped = drop(rows, 0.5)
    dropped.backward(torch.full_like(rows, torch.inf))
    assert rows.grad is not None and dropped.dtype == rows.grad.dtype == dtype
    assert dropped.isnan().all()
    assert not rows.grad.isfinite().any()  # as in torch: infinity if kept, NaN if dropped


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.nothing = nn.Dropout(0.5), nn.Dropout(0.0)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.nothing(self.dropout(rows))
        rows = functional.dropout(rows, training=self.training, p=0.25)
        return functional.dropout(rows + 1, training=self.training, inplace=True)


@pytest.mark.parametrize(("is_training", "replaced"), [(True, 2), (False, 0)])
def test_only_dropout_that_does_something_is_replaced(is_training: bool, replaced: int) -> None:
    targets: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        hash_dropout(graph)
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    layer = Layer().train(is_training)
    torch.compile(layer, backend=backend)(torch.ones(4, 64))
    torch._dynamo.reset()
    assert targets.count(drop) == replaced
    assert targets.count(functional.dropout) == 4 - replaced


def test_nested_tensors_keep_torchs_dropout() -> None:
    torch._dynamo.reset()
    layer = nn.Dropout(0.5)
    CompiledBlocks("eager", rewrites=[hash_dropout]).add(layer)
    rows = [torch.ones(3, 64), torch.ones(5, 64)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    dropped = layer(nested).values()
    torch._dynamo.reset()
    assert dropped.shape == (8, 64)
    assert set(dropped.detach().unique().tolist()) == {0.0, 2.0}


def test_a_block_keeps_no_mask_for_its_backward_pass() -> None:
    torch._dynamo.reset()
    layer = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    CompiledBlocks("aot_eager", rewrites=[hash_dropout]).add(layer)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(torch.ones(4, 8)).sum().backward()
    torch._dynamo.reset()
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in saved}
    assert ((4, 64), torch.float32) in kinds
    assert ((1,), torch.int64) in kinds
    assert not any(dtype is torch.bool for _, dtype in kinds)
