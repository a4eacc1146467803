"""Constants that a model computes on the host are copied to the device once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.cuda_graph.host_constants import HostConstants, without_host_constants
from rapidformer.compat.torch_dispatch import get_function_mode

META = torch.device("meta")
"""Stands for a GPU: it takes copies, too."""
GIVEN = torch.zeros(3)
ON_DEVICE = torch.zeros(3, device=META)


class Copies(TorchDispatchMode):
    """Counts what is copied from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].device != META and result.device == META
        return result


def bucket(size: int) -> Tensor:
    distances = torch.arange(size)[None, :] - torch.arange(size)[:, None]
    return torch.where(distances < 2, distances, torch.full_like(distances, 2))


def write_in_place() -> Tensor:
    mask = torch.zeros(4)
    mask[1:] = 1.0
    return mask.neg_().to(META)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.eye(4).to(META),
        lambda: torch.eye(3).to(ON_DEVICE),
        lambda: torch.ones(3).type_as(ON_DEVICE),
        lambda: bucket(5).to(device=META),
        lambda: bucket(5).to(META, torch.bfloat16),
        lambda: torch.tensor(2.5, dtype=torch.bfloat16, device=META),
        lambda: torch.tensor([1, 2, 3], device="meta"),
        write_in_place,
    ],
)
def test_a_constant_is_copied_once(compute: Callable[[], Tensor]) -> None:
    expected, constants = compute(), HostConstants(META)
    with constants, Copies() as copies:
        first = compute()
    with constants, Copies() as again:
        second = compute()
    assert (copies.count, again.count) == (1, 0)
    assert first is not second
    for result in (first, second):
        assert (result.device, result.dtype, result.shape, result.stride()) == (
            META, expected.dtype, expected.shape, expected.stride(),
        )  # fmt: skip


def add_given() -> Tensor:
    mask = torch.zeros(3)
    view = mask[:]
    view += GIVEN
    return mask.to(META)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: GIVEN.to(META),
        lambda: (torch.ones(3) * GIVEN).to(META),
        lambda: torch.rand(3).to(META),
        lambda: torch.add(torch.ones(3), GIVEN, out=torch.zeros(3)).to(META),
        lambda: torch.from_numpy(GIVEN.numpy()).to(META),
        add_given,
    ],
)
def test_what_else_the_host_computes_is_copied_every_time(compute: Callable[[], Tensor]) -> None:
    constants = HostConstants(META)
    for _ in range(2):
        with constants, Copies() as copies:
            compute()
        assert copies.count == 1


def test_a_copy_has_the_values_and_belongs_to_the_caller() -> None:
    constants = HostConstants(torch.device("cpu"))
    with constants:
        copy = bucket(4).to("cpu", torch.float32)
        copy += 1
        assert torch.equal(bucket(4).to("cpu", torch.float32), copy - 1)
        assert torch.tensor(2.5, device="cpu").item() == 2.5
    assert torch.equal(copy - 1, bucket(4).float())


def test_another_value_is_another_copy() -> None:
    constants = HostConstants(META)
    with constants, Copies() as copies:
        for size in (3, 4, 3):
            torch.ones(size).to(META)
            torch.zeros(size).to(META)
    assert copies.count == 4


def test_large_constants_are_copied_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidformer.accel.cuda_graph.host_constants._MOST_BYTES", 64)
    with HostConstants(META), Copies() as copies:
        for _ in range(2):
            torch.ones(32).to(META)
    assert copies.count == 2


def test_compiled_blocks_are_not_compiled_again_for_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    compiled, rows = CompiledBlocks("eager"), torch.ones(2, 3)
    for block in model:
        compiled.add(block)
    expected = model(rows)
    count = compiled.graphs
    with HostConstants(META):
        assert torch.equal(model(rows), expected)
        with Copies() as copies:
            for _ in range(2):
                bucket(4).to(META)
    assert copies.count == 1, "it goes on afterwards"
    assert compiled.graphs == count > 0
    assert compiled.recompilations == 0


def test_a_mode_of_the_users_own_stays_where_it_is() -> None:
    class Own(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with HostConstants(META), Own() as own:
        with without_host_constants():
            assert get_function_mode() is own
        assert get_function_mode() is own
    assert get_function_mode() is None


def test_a_constant_that_is_trained_is_made_anew() -> None:
    device = torch.device("cpu")
    with HostConstants(device):
        for _ in range(2):
            value = torch.tensor(2.0, device=device, requires_grad=True)
            (value * value).backward()
            assert value.grad == 4
        assert not torch.tensor(2.0, device=device).requires_grad
