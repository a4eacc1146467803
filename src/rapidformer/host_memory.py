"""How much host memory is free."""

from __future__ import annotations

import math
from pathlib import Path

_SYSTEM = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def measure_free_memory(system: Path = _SYSTEM, container: Path = _CONTAINER) -> float:
    """Bytes that can be used without swapping; infinity if the system does not say."""
    available = _read_numbers(system).get("MemAvailable:", math.inf) * 1024
    return min(available, _measure_container(container))


def _measure_container(folder: Path) -> float:
    """What a container's own limit leaves. Cached files count as used there, but can be dropped."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return math.inf
    cached = _read_numbers(folder / "memory.stat").get("inactive_file", 0)
    return math.inf if limit == "max" else int(limit) - used + cached


def _read_numbers(path: Path) -> dict[str, int]:
    """The lines of a file that begin with a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
