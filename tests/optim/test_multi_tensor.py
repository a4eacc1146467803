"""AdamW in a few launches: when torch steps in, its state, and the tables of the launches.

The kernels themselves are tested on a GPU, in tests/gpu/test_multi_tensor.py.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import rapidformer.optim.multi_tensor as package
from rapidformer.compat import triton
from rapidformer.optim.multi_tensor import adamw, norm, tables
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.multi_tensor.launch import describe_group


class _Kernel:
    """Keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **_: self.launches.append((grid, *args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels that do nothing, for a CPU that passes as a GPU."""
    fake: Any = ModuleType(f"{package.__name__}.kernel")
    fake.advance, fake.update = _Kernel(), _Kernel()
    fake.TYPES = dict.fromkeys((torch.float32, torch.bfloat16))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(package, "kernel", fake, raising=False)
    monkeypatch.setattr(adamw, "has_triton", lambda _: True)
    monkeypatch.setattr(adamw, "_works", lambda *_: True)
    return fake


def build(cls: type[AdamW], **settings: Any) -> tuple[list[nn.Parameter], AdamW]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in (3, 0, 7)]
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 1e-2},
    ]
    return parameters, cls(groups, lr=1e-3, fused=True, **settings)


def fill(parameters: list[nn.Parameter], number: int) -> None:
    torch.manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def train(optimizer: Optimizer, parameters: list[nn.Parameter], first: int, last: int) -> None:
    for number in range(first, last):
        fill(parameters, number)
        optimizer.step()


@pytest.mark.parametrize("classes", [(AdamW, MultiTensorAdamW), (MultiTensorAdamW, AdamW)])
def test_a_run_resumes_with_the_other_class(classes: tuple[type[AdamW], type[AdamW]]) -> None:
    """Without a GPU both are torch's own AdamW, bit for bit."""
    expected, plain = build(AdamW)
    train(plain, expected, 0, 4)
    parameters, first = build(classes[0])
    train(first, parameters, 0, 2)
    saved, weights = copy.deepcopy(first.state_dict()), [p.detach().clone() for p in parameters]
    parameters, second = build(classes[1])
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    second.load_state_dict(saved)
    train(second, parameters, 2, 4)
    assert [torch.equal(a, b) for a, b in zip(parameters, expected, strict=True)] == [True] * 3
    assert second.state_dict().keys() == plain.state_dict().keys()
    assert second.state[parameters[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_hooks_run_once_a_step() -> None:
    build(AdamW)  # torch wraps the class's step
    parameters, optimizer = build(MultiTensorAdamW)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, parameters, 0, 1)
    assert calls == ["before", "after"]


def test_a_kernel_that_fails_is_replaced_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, plain = build(AdamW)
    parameters, optimizer = build(MultiTensorAdamW)
    warnings: list[str] = []
    monkeypatch.setattr(triton, "warn_once", warnings.append)
    monkeypatch.setattr(adamw, "has_triton", lambda _: True)
    monkeypatch.setitem(sys.modules, f"{package.__name__}.kernel", None)
    monkeypatch.delattr(package, "kernel", raising=False)
    adamw._start_trial.cache_clear()
    optimizer.start_trials()
    train(optimizer, parameters, 0, 2)
    adamw._start_trial.cache_clear()
    train(plain, expected, 0, 2)
    assert [torch.equal(a, b) for a, b in zip(parameters, expected, strict=True)] == [True] * 3
    assert len(warnings) == 1
    assert "the Triton kernel for AdamW cannot be used here" in warnings[0]


@pytest.mark.parametrize("setting", ["amsgrad", "maximize", "capturable"])
def test_what_the_kernel_does_not_support_is_left_to_torch(kernel: Any, setting: str) -> None:
    parameters, optimizer = build(MultiTensorAdamW)
    assert isinstance(optimizer, MultiTensorAdamW)
    fill(parameters, 0)
    assert optimizer.find_launch() is not None
    optimizer.param_groups[1][setting] = True
    assert optimizer.find_launch() is None


def test_gradients_and_weights_must_be_contiguous(kernel: Any) -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = MultiTensorAdamW([weight], fused=True)
    weight.grad = torch.randn(3, 4).t()
    assert optimizer.find_launch() is None
    weight.grad = torch.randn(4, 3).to_sparse()
    assert optimizer.find_launch() is None
    weight.grad = torch.randn(4, 3)
    assert optimizer.find_launch() is not None


def read_row(kernel: Any, number: int) -> list[int]:
    rows: Tensor = kernel.update.launches[-1][2]
    return rows.view(-1, 4)[number].tolist()


def test_tables_follow_tensors_that_move(kernel: Any) -> None:
    parameters, optimizer = build(MultiTensorAdamW)
    assert isinstance(optimizer, MultiTensorAdamW)
    train(optimizer, parameters, 0, 1)
    launch = optimizer.find_launch()
    weight = parameters[2]

    def expect() -> None:
        state = optimizer.state[weight]
        tensors = (weight, state["exp_avg"], state["exp_avg_sq"])
        assert read_row(kernel, 2) == [*(tensor.data_ptr() for tensor in tensors), 7]
        grid, _, _, gradients, *_ = kernel.update.launches[-1]
        assert grid == (2,)  # the empty tensor has no chunk
        assert gradients[2].item() == weight.grad.data_ptr()

    expect()
    weight.data, weight.grad = weight.data.clone(), torch.ones(7)
    optimizer.step()
    expect()
    for moved in (optimizer.state[weight][name] for name in adamw.MOMENTS):
        moved.data = moved.clone()
        optimizer.step()
        expect()
    assert optimizer.find_launch() is launch
    optimizer.state[weight]["exp_avg"] = torch.zeros(7)
    optimizer.step()
    expect()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer._launch is None  # it would keep the earlier moments in memory
    optimizer.step()
    expect()
    optimizer.state.clear()
    optimizer.step()
    expect()


def test_settings_reach_the_device_and_changes_are_counted(kernel: Any) -> None:
    parameters, optimizer = build(MultiTensorAdamW)
    train(optimizer, parameters, 0, 1)
    settings: Tensor = kernel.advance.launches[-1][3]
    optimizer.param_groups[0]["lr"] = 0.125
    before = parameters[0]._version
    train(optimizer, parameters, 1, 2)
    assert kernel.advance.launches[-1][3] is settings  # in place, for recorded graphs
    rows = [describe_group(group) for group in optimizer.param_groups]
    assert settings.view(2, -1).tolist() == rows
    assert rows[0][0] == 0.125
    assert parameters[0]._version == before + 1
    kernel.update.launches.clear()
    parameters[0].grad = None
    optimizer.step()
    assert kernel.update.launches[0][0] == (1,)


def test_other_precisions_and_missing_gradients_get_another_launch(kernel: Any) -> None:
    parameters, optimizer = build(MultiTensorAdamW)
    assert isinstance(optimizer, MultiTensorAdamW)
    train(optimizer, parameters, 0, 1)
    launch = optimizer.find_launch()
    assert launch is not None
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    assert not launch.prepare()
    optimizer.step()
    assert optimizer.find_launch() is not launch


def test_the_norm_of_tensors_on_two_devices_is_left_to_torch(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "has_triton", lambda _: True)
    monkeypatch.setattr(norm, "_works", lambda *_: True)
    assert norm.sum_squares([torch.ones(3), torch.ones(3, device="meta")]) is None


def test_chunks_of_tensors() -> None:
    chunks = tables.build_chunks([1, 0, 8, 9, 4], 4)
    assert chunks.dtype == torch.int32
    assert chunks.tolist() == [[0, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2], [4, 0]]
    assert tables.build_chunks([0], 4).shape == (0, 2)


def test_a_mirror_is_written_only_when_it_changes() -> None:
    mirror = tables.Mirror(torch.int64, torch.device("cpu"))
    mirror.write([1, 2])
    first, version = mirror.tensor, mirror.tensor._version
    mirror.write([1, 2])
    assert mirror.tensor._version == version
    mirror.write([3, 2])
    assert mirror.tensor is first
    assert first.tolist() == [3, 2]
    mirror.write([3, 2, 1])
    assert mirror.tensor.tolist() == [3, 2, 1]
