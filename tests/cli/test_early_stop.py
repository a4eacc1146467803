"""Ctrl-C while the command is still being imported, and in commands that save nothing."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest

from rapidformer.__main__ import start
from rapidformer.cli import main


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
    assert start() == 130, "the installed command"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "stopped by Ctrl-C: nothing after the last checkpoint was saved."),
        (
            ["--task", "causal_lm"],
            "stopped by Ctrl-C: nothing after the last checkpoint was saved.",
        ),
        (["plan"], "stopped by Ctrl-C."),
    ],
)
def test_what_is_lost(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_dispatch", stop)
    assert main.main(words) == 130
    assert capsys.readouterr().err == f"\n{said}\n"
