"""The picture of a run: long, short, without evaluation, with a torn last line."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer.errors import MissingPackageError
from rapidformer.training.curve import plot_runs


def _write(folder: Path, lines: list[dict[str, Any]], tail: str = "") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def _training(steps: int) -> list[dict[str, Any]]:
    return [{"step": i, "loss": 1 / i, "lr": 1e-3, "grad_norm": 1.0} for i in range(1, steps + 1)]


@pytest.mark.parametrize("steps", [1, 3, 60])
@pytest.mark.parametrize("has_evaluation", [True, False])
def test_pictures_are_drawn(steps: int, has_evaluation: bool, tmp_path: Path) -> None:
    lines = _training(steps)
    if has_evaluation:
        lines.append({"step": steps, "eval_loss": 0.4, "eval_accuracy": 0.8})
    picture = plot_runs([_write(tmp_path, lines)], tmp_path / "curve.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_svg_by_its_suffix(tmp_path: Path) -> None:
    picture = plot_runs([_write(tmp_path, _training(5))], tmp_path / "curve.svg")
    assert "<svg" in picture.read_text()


def test_a_line_cut_off_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    metrics = _write(tmp_path, _training(5), tail='{"step": 6, "lo')
    assert plot_runs([metrics], tmp_path / "curve.png").exists()


def test_matplotlib_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError, match=r"rapidformer\[plot\]"):
        plot_runs([_write(tmp_path, _training(3))], tmp_path / "curve.png")
