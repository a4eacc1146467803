"""Read a small settings file that may be anything: a pipe, a device, megabytes of binary data."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Any

from rapidformer.errors import ConfigurationError

_MOST_BYTES = 10_000_000
_MOST_VALUES = 100_000


def read_settings_text(path: str, flag: str) -> str:
    """The text of a settings file; anything that prevents reading it is a ConfigurationError."""
    file, problem = Path(path).expanduser(), ""
    try:
        # `--config <(...)` names a pipe of the shell's; any other pipe may never get a writer.
        is_of_shell = path.startswith(("/dev/fd/", "/proc/self/fd/"))
        kind = file.stat()
        if not stat.S_ISREG(kind.st_mode) and not is_of_shell:
            problem = "it is a folder" if file.is_dir() else "it is not a regular file"
        elif kind.st_size > _MOST_BYTES:
            problem = f"its {kind.st_size} bytes are too many for settings"
        else:
            return file.read_text(encoding="utf-8")
    except OSError as reason:
        problem = reason.strerror or str(reason)
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"
    except ValueError as reason:  # a zero byte in the name
        problem = str(reason)
    raise ConfigurationError(f"{flag} {path} cannot be read: {problem}.")


def is_expanding(content: Any) -> bool:
    """Whether a YAML document holds far more values than it spells out, through its aliases."""
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            return True
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
    return False


def split_words(text: str, problems: list[str], where: str) -> list[str]:
    """The words of a text as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as reason:
        problems.append(f"{where} cannot be split into words: {str(reason).lower()}.")
        return []
