"""``run.json``: what a checkpoint holds besides tensors. Nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.publish import read_json
from rapidformer.errors import CheckpointError

RUN = "run.json"
FORMAT = 1
_KINDS: dict[str, Any] = {
    "step": int, "scheduler": dict, "scaler": dict | None, "loader": dict | None,
    "param_groups": list | None, "extra": dict,
}  # fmt: skip
_OPTIONAL = ("tied", "facts", "base", "counter")
_LARGEST = 2**53
"""More steps or samples than any run has; JSON's numbers are exact up to here."""


def read_run(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``run.json``, with entries of the right kinds."""
    run = read_json(folder / RUN)
    if run.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {run.get('format')}, this version reads format {FORMAT}."
        )
    wrong = [name for name, kind in _KINDS.items() if not isinstance(run.get(name, ...), kind)]
    wrong += [name for name in _OPTIONAL if not isinstance(run.get(name, {}), dict)]
    if not wrong:
        checks = {
            "step": _is_count(run["step"]),
            "scheduler": _is_count(run["scheduler"].get("last_epoch", 0)),
            "tied": all(isinstance(name, str) for name in run.get("tied", {}).values()),
        }
        wrong = [name for name, is_sound in checks.items() if not is_sound]
    if not wrong and (place := run["loader"]) is not None:
        numbers = [place.get("epoch"), place.get("consumed_samples"), *place.values()]
        wrong = [] if all(map(_is_count, numbers)) else ["loader"]
    if wrong:
        raise _build_error(folder, f"{', '.join(wrong)} is missing or malformed")
    return run


@contextmanager
def blaming(folder: Path) -> Iterator[None]:
    """Report what cannot be restored from a ``run.json`` as the file's fault."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        raise _build_error(folder, f"{type(reason).__name__}: {reason}") from None


def _is_count(number: Any) -> bool:
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    return is_whole and 0 <= number <= _LARGEST


def _build_error(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder / RUN} is not what a run writes: {reason}.")
