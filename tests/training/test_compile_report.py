"""The line about ``--compile``: when a step has compiled nothing, and again if more follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.training.callbacks import Control
from rapidformer.training.report import CompileReport


def test_the_line_appears_when_a_step_has_compiled_nothing() -> None:
    blocks, said = CompiledBlocks("eager"), []
    report = CompileReport(blocks)
    loop: Any = SimpleNamespace(say=said.append)
    counts = []
    for graphs in (1, 2, 2, 2, 3, 3):
        blocks.graphs = graphs
        report.on_step_end(loop, Control())
        counts.append(len(said))
    assert counts == [0, 0, 1, 1, 1, 2]
    assert said[0].startswith("compiled  2 graphs in ")
    assert said[1].endswith(" s, 0 recompilations")


def test_a_first_step_that_compiles_nothing_is_reported_once() -> None:
    said: list[str] = []
    report = CompileReport(CompiledBlocks("eager"))
    for _ in range(3):
        report.on_step_end(SimpleNamespace(say=said.append), Control())  # type: ignore[arg-type]
    assert len(said) == 1 and said[0].startswith("compiled  nothing: torch found nothing")
