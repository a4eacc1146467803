"""Stacks of blocks: in which order recordings may be replayed, and what is one chain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, PreTrainedModel

from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.chains import Following
from tests.training.test_block_graphs import Again


class SharedMemory(Again):
    """What is recorded first may be overwritten by all that follows, as in a CUDA graph's pool."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        """The number of each recording when it was replayed."""

    def record(self, function: Callable[[], list[Tensor]]) -> Any:
        first, replay = super().record(function)
        number = self.recorded

        def replay_and_note() -> None:
            self.order.append(number)
            replay()

        return first, replay_and_note


class Deep(nn.Module):
    """Each block has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        return hidden


def balance(model: nn.Module, x: Tensor) -> Tensor:
    """The weight of the first head's loss depends on gradients, as in VQGAN and GradNorm."""
    first, _, last = (each.square().mean() for each in model(x))
    shared: Any = model.layers
    (early,) = torch.autograd.grad(first, shared[0].weight, retain_graph=True)
    (late,) = torch.autograd.grad(last, shared[0].weight, retain_graph=True)
    return last + first * (late.norm() / early.norm()).detach()


def take_turns(model: nn.Module, x: Tensor) -> Tensor:
    """Calls its blocks in another order every other time."""
    shared: Any = model.layers
    order = [0, 1, 2] if x.sum() > 0 else [2, 0, 1]
    parts = [shared[i](x).tanh().square().mean() * (i + 1) for i in order]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("step", [balance, take_turns])
def test_recordings_that_share_memory_are_replayed_in_their_order(
    step: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    model = Deep()
    plain = copy.deepcopy(model)
    capture: Any = SharedMemory()
    graphs = BlockGraphs(model, list(model.layers), capture)
    for sign in (1, 1, 1, 1, -1, 1):
        x, recorded = torch.rand(4, 8) * sign, capture.recorded
        capture.order.clear()
        with graphs.passing():
            loss = step(model, x)
        loss.backward()
        step(plain, x).backward()
        assert graphs.problem is None
        if capture.recorded == recorded > 0:  # recordings are replayed, too
            assert capture.order == sorted(capture.order) != []
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
            mine.grad = theirs.grad = None


class Twins(PreTrainedModel):
    """Two stacks whose blocks take turns."""

    config_class = BertConfig

    def __init__(self) -> None:
        super().__init__(BertConfig())
        torch.manual_seed(0)
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for left, right in zip(self.left, self.right, strict=True):
            x = left(x)
            y = right(y)
        return (x * y).sum()


def test_blocks_with_others_in_between_are_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Twins.forward, "__module__", "transformers.models.twins")
    model = Twins()
    plain = copy.deepcopy(model)
    capture: Any = Again()
    graphs = BlockGraphs(model, [*model.left, *model.right], capture)
    for _ in range(4):
        x = torch.rand(4, 8)
        with graphs.passing():
            loss = model(x)
        assert torch.equal(loss, plain(x))
        loss.backward()
    assert graphs.problem is None
    assert capture.replayed > capture.recorded == 8


class Gated(nn.Module):
    """A block whose input comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * gate


class Stages(PreTrainedModel):
    """The second stack gets what the first one returns."""

    config_class = BertConfig

    def __init__(self) -> None:
        super().__init__(BertConfig())
        torch.manual_seed(0)
        self.first = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(2))
        self.second = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        for block in self.first:
            x = block(x, gate)
        for block in self.second:
            x = block(gate, x)
        return x.sum()


def test_a_chain_ends_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stages.forward, "__module__", "transformers.models.stages")
    monkeypatch.setattr(Following, "recover", None)
    model = Stages()
    plain = copy.deepcopy(model)
    capture: Any = Again()
    graphs = BlockGraphs(model, [*model.first, *model.second], capture)
    for _ in range(5):
        x, gate = torch.rand(4, 8), torch.rand(4, 8)
        with graphs.passing():
            loss = model(x, gate)
        assert torch.equal(loss, plain(x, gate))
        loss.backward()
    assert graphs.problem is None
    assert capture.replayed > capture.recorded == 4
