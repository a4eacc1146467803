"""Which command lines are meant for us."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer import RapidformerEngine, context
from rapidformer.cli import train
from rapidformer.config import Settings, parse, parse_arguments
from rapidformer.config.parse import read_command_line
from rapidformer.errors import ConfigurationError

Read = Callable[..., Settings]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read a command line, by itself in the environment."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(context._current, "is_started", False)
    monkeypatch.setattr(context._current, "was_read", None)

    def read(*argv: str, provider: Any = None) -> Settings:
        monkeypatch.setattr(sys, "argv", list(argv))
        return read_command_line(provider)

    return read


@pytest.mark.parametrize(
    "argv",
    [
        ("/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json"),
        ("/lib/ipykernel_launcher.py", "--f=/run/kernel-1.json"),
        ("/lib/colab_kernel_launcher.py", "-f", "/run/kernel-1.json"),
        ("script.py", "--my-own-flag", "3"),
        ("script.py", "a.txt", "-v"),
        ("script.py",),
    ],
)
def test_what_is_not_ours_is_left_alone(read: Read, argv: tuple[str, ...]) -> None:
    assert read(*argv) == Settings()


def test_a_notebook_started_by_a_launcher_has_no_flags_of_ours(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert read("/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json") == Settings()


def test_a_flag_of_ours_makes_the_command_line_ours(read: Read) -> None:
    assert read("script.py", "--micro_batch_size", "4").micro_batch_size == 4
    assert read("script.py", "--lr=1").lr == 1
    assert read("script.py", "--no-load-optim").load_optim is False
    with pytest.raises(ConfigurationError, match="unknown flag --my-own-flag"):
        read("script.py", "--lr", "1", "--my-own-flag", "3")


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "RAPIDFORMER_FLAGS"])
def test_under_a_launcher_every_flag_must_be_known(
    read: Read, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "--seed 3" if variable == "RAPIDFORMER_FLAGS" else "job")
    with pytest.raises(ConfigurationError, match="unknown flag --my-own-flag"):
        read("script.py", "--my-own-flag", "3")
    assert read("script.py").seed == (3 if variable == "RAPIDFORMER_FLAGS" else 1234)


def test_a_script_of_the_command_is_ours(read: Read) -> None:
    context.mark_as_started()
    with pytest.raises(ConfigurationError, match="unknown flag --my-own-flag"):
        read("script.py", "--my-own-flag", "3")


def test_what_the_command_has_read_is_not_read_again(read: Read) -> None:
    args = parse_arguments(["--lr", "1"])
    context.mark_as_started((["--lr", "1"], args))
    assert read("script.py", "--lr", "1") is args
    assert read("script.py", "--lr", "2").lr == 2


@pytest.mark.parametrize("more", [[], ["--my-own-flag", "3"]])
def test_the_engine_of_a_script_has_the_settings_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Read, more: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("from rapidformer.config.parse import read_command_line\n"
                      "args = read_command_line()\n", encoding="utf-8")  # fmt: skip
    parsed: list[Any] = []
    read_words = parse._read_words
    monkeypatch.setattr(parse, "_read_words", lambda *a: parsed.append(a) or read_words(*a))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = parse.read_flags(["--user-script", str(script), "--lr", "1", *more])
    with contextlib.ExitStack() as stack:
        if more:
            stack.enter_context(pytest.raises(ConfigurationError, match="--my-own-flag"))
        train.run(command)
    assert len(parsed) == (2 if more else 1)


def test_a_scripts_own_flags_count_if_it_names_them(read: Read) -> None:
    calls: list[Any] = []

    def provide(parser: Any) -> None:
        calls.append(parser)
        parser.add_argument("--my-own-flag", type=int, default=5)

    assert read("script.py", "--my-own-flag", "3", provider=provide).my_own_flag == 3
    assert len(calls) == 1
    assert read("ipykernel_launcher.py", "-f", "x.json", provider=provide).my_own_flag == 5


def test_a_mistyped_flag_does_not_pass_for_a_scripts_own(
    read: Read, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    read("script.py", "--micro-batch-sise", "4")
    said = capsys.readouterr().err + caplog.text
    assert "did you mean --micro-batch-size?" in said


def test_the_engine_of_a_notebook_takes_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "/run/kernel-1.json"])
    engine = RapidformerEngine()
    assert not any(engine.args.is_given(name) for name in engine.args.sources)
    engine.close()
