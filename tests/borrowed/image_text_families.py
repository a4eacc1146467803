"""Twelve steps of every family that reads images, beside a bare loop: takes minutes, not in CI.

    python -m tests.borrowed.image_text_families

One process with accumulation, two processes, ZeRO-3, LoRA and a frozen tower; prints the largest
difference of any weight after any step, at a learning rate of 0.05. Round-off grows from step to
step, so the first line of a family says how far the bare loop is from itself in double precision.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.processes import run_in_kept_processes
from tests.tasks import test_image_text_layouts as layouts
from tests.tasks.image_text_rig import FAMILIES, build_model, save_family

_ROWS = 48
_LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": layouts.TRAINED,
    "ZeRO-3": layouts.TRAINED | layouts.ZERO,
    "frozen, ZeRO-3": layouts.ZERO,
    "LoRA, ZeRO-3": layouts.LORA | layouts.ZERO,
}


def run_layout(family: str, name: str, folder: Path) -> layouts.Weights:
    return layouts.run_task(family, folder, _ROWS, **_LAYOUTS[name]).weights


def run_bare(family: str, **options: Any) -> layouts.Weights:
    return layouts.run_bare(build_model(family), family, rows=_ROWS, **options)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for family in FAMILIES:
            save_family(family, folder)
            whole, frozen = (run_bare(family, is_whole=is_whole) for is_whole in (True, False))
            exact = run_bare(family, is_whole=True, is_double=True)
            print(f"{family:10} bare loop, round-off: {_compare(whole, exact):.1e}")
            lora = layouts.run_task(family, folder, _ROWS, micro_batch_size=4, **layouts.LORA)
            one = layouts.run_task(family, folder, _ROWS, micro_batch_size=1, **layouts.TRAINED)
            gaps = [_compare(one.weights, other) for other in (whole, exact)]
            print(f"{family:10} one process, accumulation: {gaps[0]:.1e}, to double {gaps[1]:.1e}")
            adapted = layouts.build_adapted(family, lora.weights)
            bare = layouts.run_bare(adapted, family, is_whole=True, rows=_ROWS)
            print(f"{family:10} one process, LoRA: {_compare(lora.weights, bare):.1e}")
            wanted = (whole, whole, frozen, bare)
            for name, expected in zip(_LAYOUTS, wanted, strict=True):
                result = run_in_kept_processes(run_layout, 2, family, name, folder)[0]
                gap = _compare(result, expected)
                print(f"{family:10} two processes, {name}: {gap:.1e}", flush=True)


def _compare(result: layouts.Weights, expected: layouts.Weights) -> float:
    assert len(result) == len(expected) == _ROWS // 4
    return max(
        float((weights[name] - wanted[name]).abs().max())
        for weights, wanted in zip(result, expected, strict=True)
        for name in wanted
    )


if __name__ == "__main__":
    main()
