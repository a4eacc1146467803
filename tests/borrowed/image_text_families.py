"""Twelve steps of every family that reads images, beside a bare loop: takes minutes, not in CI.

    python -m tests.borrowed.image_text_families

One process with accumulation, two processes, ZeRO-3, LoRA and a frozen tower; prints the largest
difference of any weight after any step, at a learning rate of 0.05.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.processes import run_in_processes
from tests.tasks import test_image_text_layouts as layouts
from tests.tasks.image_text_rig import FAMILIES, save_family

_ROWS = 48
_LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": layouts.TRAINED,
    "ZeRO-3": layouts.TRAINED | layouts.ZERO,
    "frozen, ZeRO-3": layouts.ZERO,
    "LoRA, ZeRO-3": layouts.LORA | layouts.ZERO,
}


def run_layout(family: str, name: str, folder: Path) -> layouts.Weights:
    return layouts.run_task(family, folder, _ROWS, **_LAYOUTS[name]).weights


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for family in FAMILIES:
            save_family(family, folder)
            whole = layouts.run_bare(family, is_whole=True, rows=_ROWS)
            frozen = layouts.run_bare(family, is_whole=False, rows=_ROWS)
            lora = layouts.run_task(family, folder, _ROWS, micro_batch_size=4, **layouts.LORA)
            one = layouts.run_task(family, folder, _ROWS, micro_batch_size=1, **layouts.TRAINED)
            print(f"{family:10} one process, accumulation: {_compare(one.weights, whole):.1e}")
            wanted = (whole, whole, frozen, lora.weights)
            for name, expected in zip(_LAYOUTS, wanted, strict=True):
                result = run_in_processes(run_layout, 2, family, name, folder)[0]
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
