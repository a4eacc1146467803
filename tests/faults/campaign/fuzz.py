"""Command lines and YAML files that nobody would write: an error in words, never a traceback."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rapidformer.cli.main import main
from rapidformer.config import get_settings

SECONDS = 60
"""Longer than any answer takes, on a machine as busy as it may be."""
_VALUES = (
    "", "-1", "0", "1", "2", "3.5", "1e400", "-1e30", "nan", "inf", "9" * 400, "0x10", "1_000",
    "true", "no", "none", "null", "auto", "a", "\0", "\n", "é²", "'", '"', "{", "[1, 2", "--", "-",
    "=", "a=b", "~", "~/x", "~nosuchuser/x", "\udcff",
    "9" * 5000, '{"a": ' * 3000, "/", "/dev/zero", "/proc/self/mem", "..", "*", "%s", "{0}",
    "a" * 3000, "1,2,3", "[1, 2]", "{a: 1}", "bf16", "steps", "epoch", "cosine", "adam", "gpt",
    "text",
)  # fmt: skip
_KEYS = ("", "lr", "a.b", "- x", "? y", "&a", "*a", "<<", "!!python/object:os.system", "%TAG", "\t")
_COMMANDS = (
    "train",
    "evaluate",
    "predict",
    "train",
    "evaluate",
    "runs",
    "check",
    "plot",
    "tasks",
    "export",
    "explain",
)


class HungError(BaseException):
    """The command took too long; not an Exception, so that nobody catches it."""


@dataclass
class Answer:
    """What a command made of its words."""

    words: list[str]
    file: str | None
    status: object
    problem: str | None = None


def write_words(dice: random.Random) -> list[str]:
    """Flags, most of them real, with values of every kind, in any spelling."""
    flags = [setting.flag for setting in get_settings().values()]
    words = []
    for _ in range(dice.randint(0, 6)):
        flag = dice.choice(flags) if dice.random() < 0.9 else dice.choice(["--", "-", "--x", "---"])
        flag = flag.replace("-", "_").replace("__", "--", 1) if dice.random() < 0.1 else flag
        flag = flag[: dice.randint(1, len(flag))] if dice.random() < 0.05 else flag
        value = dice.choice(_VALUES)
        kind = dice.random()
        words += [f"{flag}={value}"] if kind < 0.3 else [flag] if kind < 0.5 else [flag, value]
    return words


def write_yaml(dice: random.Random) -> bytes:
    """Mostly settings, sometimes nested or broken, sometimes not even text."""
    names = list(get_settings())
    lines = []
    for _ in range(dice.randint(0, 8)):
        name = dice.choice(names) if dice.random() < 0.85 else dice.choice(_KEYS)
        indent = "  " * dice.randint(0, 2) if dice.random() < 0.1 else ""
        lines.append(
            f"{indent}{name}{dice.choice([': ', ': ', ': ', ':', ' '])}{dice.choice(_VALUES)}"
        )
    content = "\n".join(lines).encode(errors="surrogateescape")
    if dice.random() < 0.1:
        place = dice.randint(0, len(content))
        content = content[:place] + dice.randbytes(dice.randint(1, 9)) + content[place:]
    return content


def answer(words: list[str], content: bytes | None) -> Answer:
    """Run a command in this process, as the shell's would."""
    written, spoken = io.StringIO(), io.StringIO()
    problem, status = None, None

    def give_up(number: int, frame: FrameType | None) -> None:
        raise HungError("".join(traceback.format_stack(frame)[-5:]))

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(spoken):
            status = main(words)
        if "Traceback" in spoken.getvalue():
            problem = spoken.getvalue()
        elif status not in (0, 1, 2) or (status and "error" not in spoken.getvalue()):
            problem = f"status {status}: {spoken.getvalue()!r}"
    except HungError as place:
        problem = f"hung at\n{place}"
    except BaseException:
        problem = traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Answer(words, repr(content) if content is not None else None, status, problem)


def run_fuzz(folder: Path, *, runs: int, seed: int) -> Iterator[Answer]:
    """Command lines and YAML files by turns; nothing of what they ask for is begun."""
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fuzz.yaml"
    with contextlib.chdir(folder):
        for number in range(runs):
            command = dice.choice(_COMMANDS)
            content = write_yaml(dice) if number % 2 else None
            words = write_words(dice) if number % 2 == 0 or dice.random() < 0.2 else []
            if content is not None:
                path.write_bytes(content)
                words = ["--config", str(path), *words]
            # Settled but not started: that is what this flag is for.
            is_run = command in ("train", "evaluate", "predict")
            yield answer([command, *words, *(["--print-config"] if is_run else [])], content)
