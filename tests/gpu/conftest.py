"""What Triton compiles during a test."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that Triton has compiled since, or loaded from its cache."""
    knobs = pytest.importorskip("triton.knobs")
    names: list[str] = []

    def add(*_: Any, fn: Any, **__: Any) -> None:
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", add)
    return names
