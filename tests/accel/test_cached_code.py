"""Compiled code from torch's cache: found by the next run, and never used for something else."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch.nn.attention import SDPBackend, sdpa_kernel

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.compile.hashed_dropout import hash_dropout
from rapidformer.accel.compile.merged_linears import merge_linears
from rapidformer.compat import torch_compile
from rapidformer.compat.torch_compile import count_cached_graphs

pytestmark = pytest.mark.slow

ROWS = torch.linspace(-1, 1, 2 * 4 * 8).reshape(2, 4, 8).sin()


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    torch._dynamo.reset()
    # Operators run as they are: generating code would take much longer, and is not needed here.
    with (
        torch._inductor.config.patch(fallback_by_default=True),
        torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex),  # type: ignore[attr-defined]
    ):
        yield
    torch._dynamo.reset()


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        with torch.autocast("cpu", enabled=False):
            return gradient / 2


class Block(nn.Module):
    """Has everything that torch would not cache by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows: Tensor) -> Tensor:
        mixed = self.dropout(self.query(rows) * self.key(rows))
        halved: Tensor = Halve.apply(mixed)  # type: ignore[no-untyped-call]
        return halved


def run(block: nn.Module, dtype: torch.dtype = torch.bfloat16) -> tuple[int, list[Tensor]]:
    """What a new run gets: how many graphs were cached, the output and all gradients."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    compiled = CompiledBlocks("inductor", rewrites=[merge_linears, hash_dropout])
    compiled.add(block)
    with torch.autocast("cpu", dtype=dtype):
        output = block(ROWS)
    output.sum().backward()
    assert (compiled.graphs, compiled.recompilations) == (1, 0)
    assert ("(1 from the cache)" in compiled.describe()) == bool(compiled.from_cache)
    gradients = [each.grad for each in block.parameters() if each.grad is not None]
    return compiled.from_cache, [output, *gradients]


class StopError(Exception):
    """Stops the compiler."""


def test_a_second_run_finds_its_code_and_another_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    block = Block()
    cached, expected = run(copy.deepcopy(block))
    assert (cached, len(expected)) == (0, 5)
    cached, found = run(copy.deepcopy(block))
    assert cached == 1
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))

    # From here on, code is looked for in the cache, but not compiled.
    load, is_found = AOTAutogradCache.try_load, []

    def look(*args: Any, **options: Any) -> None:
        before = count_cached_graphs()
        load(*args, **options)
        is_found.append(count_cached_graphs() > before)
        raise StopError

    def look_for(block: nn.Module, dtype: torch.dtype = torch.bfloat16) -> bool:
        with pytest.raises(Exception, match="StopError"):
            run(block, dtype)
        return is_found.pop()

    monkeypatch.setattr(AOTAutogradCache, "try_load", look)
    assert look_for(block)
    assert not look_for(block, torch.float16)
    with sdpa_kernel([SDPBackend.MATH]):
        assert not look_for(block)
    with monkeypatch.context() as changed:
        changed.setattr(block.dropout, "p", 0.25)
        assert not look_for(block)
    with monkeypatch.context() as changed:
        changed.setattr(Halve, "backward", lambda ctx, gradient: gradient / 4)
        assert not look_for(block)
    assert look_for(block)
    monkeypatch.setattr(torch_compile, "describe_sources", lambda: "another version")
    assert not look_for(block)


@torch.compiler.allow_in_graph
def keep(rows: Tensor) -> Tensor:
    """A function that torch does not look into, so its cache cannot know what it does."""
    return rows


@torch.library.custom_op("elsewhere::copy", mutates_args=())
def copy_rows(rows: Tensor) -> Tensor:
    """An operator that torch's cache knows by name only, although its code may change."""
    return rows.clone()


copy_rows.register_fake(torch.empty_like)


@pytest.mark.parametrize("unknown", [None, keep, copy_rows], ids=["known", "function", "operator"])
def test_graphs_with_unknown_code_are_not_cached(
    unknown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_cache: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        allows_functions = functorch_config.autograd_cache_allow_custom_autograd_functions
        may_cache.append(allows_functions and functorch_config.enable_autograd_cache)
        return graph

    if unknown is not None:
        monkeypatch.setattr(Halve, "forward", lambda ctx, rows: unknown(rows) / 2)
    block = Block()
    CompiledBlocks(backend).add(block)
    block(ROWS)
    assert may_cache == [unknown is None]
