"""The kernel for a learned bias: which calls it gets, and what torch.compile sees of it.

Tensors are on the meta device: the kernel itself needs a GPU (``tests/gpu/test_learned_bias.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rapidformer.accel.attention import learned_bias
from rapidformer.accel.attention.learned_bias import interface
from rapidformer.compat import triton

BATCH, HEADS, TOKENS, SIZE = 2, 3, 10, 16
CHANGES: dict[str, dict[str, Any]] = {
    "no bias": {"bias": None},
    "a bias without a gradient": {"needs_gradient": False},
    "fp32": {"dtype": torch.float32},
    "a head size of 24": {"size": 24},
    "fewer key heads": {"key_heads": 1},
    "a bias of other lengths": {"bias": (1, HEADS, TOKENS, 1)},
    "causal, with more keys than queries": {"keys": 12, "bias": (1, HEADS, TOKENS, 12)},
    "everything dropped": {"dropout": 1.0},
    "queries too far apart for 32 bits": {"distance": 2**28},
}


@pytest.fixture(autouse=True)
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interface, "_DEVICE", "meta")
    with torch.device("meta"):
        yield


class Causal(nn.Module):
    is_causal = True


def plain(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[str, None]:
    return "plain", None


def call(
    *,
    dtype: torch.dtype = torch.bfloat16,
    size: int = SIZE,
    keys: int = TOKENS,
    key_heads: int = HEADS,
    bias: tuple[int, ...] | None = (1, HEADS, TOKENS, TOKENS),
    needs_gradient: bool = True,
    dropout: float = 0.1,
    mask: Tensor | None = None,
    distance: int | None = None,
) -> Any:
    row = distance or HEADS * size
    strides = (TOKENS * row, size, row, 1)
    query = torch.empty_strided((BATCH, HEADS, TOKENS, size), strides, dtype=dtype)
    key, value = torch.empty(2, BATCH, key_heads, keys, size, dtype=dtype).unbind()
    learned = None if bias is None else torch.empty(bias, requires_grad=needs_gradient)
    attend = interface.build_attention(plain)
    return attend(Causal(), query, key, value, mask, position_bias=learned, dropout=dropout)[0]


def test_a_call_that_suits_gets_the_kernel() -> None:
    output = call()
    assert output.shape == (BATCH, TOKENS, HEADS, SIZE)
    assert output.is_contiguous()


@pytest.mark.parametrize("change", CHANGES)
def test_other_calls_use_the_plain_attention(change: str) -> None:
    assert call(**CHANGES[change]) == "plain"


def test_without_gradients_calls_use_the_plain_attention() -> None:
    with torch.no_grad():
        assert call() == "plain"


@pytest.mark.parametrize("mask", [torch.bool, torch.float32, None])
@pytest.mark.parametrize("shape", [(1, HEADS), (BATCH, HEADS), (1, 1)])
def test_gradients_have_the_shapes_of_what_they_are_for(
    mask: torch.dtype | None, shape: tuple[int, int]
) -> None:
    query, key, value = (
        torch.empty(BATCH, HEADS, TOKENS, SIZE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    bias = torch.empty(*shape, TOKENS, TOKENS, requires_grad=True)
    hidden = None if mask is None else torch.empty(BATCH, 1, 1, TOKENS, dtype=mask)
    attend = interface.build_attention(plain)
    output = attend(Causal(), query, key, value, hidden, position_bias=bias)[0]
    output.sum().backward()
    for each in (query, key, value, bias):
        assert each.grad is not None
        assert (each.grad.shape, each.grad.dtype) == (each.shape, each.dtype)


def test_a_compiled_block_keeps_one_graph_for_all_lengths() -> None:
    graphs: list[list[str]] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    attend, module = interface.build_attention(plain), Causal()

    def block(projected: Tensor, bias: Tensor) -> Tensor:
        query, key, value = projected.unbind()
        options = {"position_bias": bias, "dropout": 0.1}
        attended: Tensor = attend(module, query, key, value, None, **options)[0]
        return attended * 2

    compiled = torch.compile(block, backend=keep, fullgraph=True, dynamic=True)
    for tokens in (10, 16):
        projected = torch.empty(3, BATCH, HEADS, tokens, SIZE, dtype=torch.bfloat16)
        bias = torch.empty(1, HEADS, tokens, tokens, requires_grad=True)
        compiled(projected, bias).sum().backward()
        assert bias.grad is not None
    assert len(graphs) == 1
    assert "rapidformer.attend_with_bias.default" in graphs[0]


@pytest.mark.parametrize(
    ("capability", "has_triton", "can"),
    [((9, 0), True, True), ((9, 0), False, False), ((8, 9), True, False), ((12, 0), True, False)],
)
def test_gpus_that_can_run_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_triton: bool, can: bool
) -> None:
    monkeypatch.setattr(interface, "has_triton", lambda _: has_triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert interface.fits(torch.device("cuda")) == can


def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(triton, "warn_once", warnings.append)
    monkeypatch.setattr(interface, "fits", lambda _: True)
    monkeypatch.setitem(sys.modules, f"{learned_bias.__name__}.forward", None)
    monkeypatch.delattr(learned_bias, "forward", raising=False)
    interface.can_run.cache_clear()
    assert [interface.can_run(torch.device("cpu")) for _ in range(2)] == [False, False]
    interface.can_run.cache_clear()
    assert len(warnings) == 1
    assert "the Triton kernel for attention with a learned bias cannot be used here" in warnings[0]
