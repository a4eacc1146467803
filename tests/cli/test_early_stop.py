"""Ctrl-C while the command itself is still being imported."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest


class Stops:
    """Finds no module, and is stopped while it looks for the command's."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "rapidformer.cli.main":
            raise KeyboardInterrupt


def test_there_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rapidformer.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Stops(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("rapidformer", run_name="__main__")
    assert stop.value.code == 130
