"""The name somebody probably meant, if any is close enough."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Two letters in eight may differ. Names further apart share letters, not meaning.
_LEAST_LIKENESS = 0.75


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one is likely a misspelling of; None if there is none."""
    words = {_normalize(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_normalize(name), words, n=1, cutoff=_LEAST_LIKENESS)
    return words[found[0]] if found else None


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence with that name, or nothing."""
    near = find_nearest(name, known)
    return f" Did you mean {near}?" if near else ""


def _normalize(name: str) -> str:
    # Dashes are not letters: they would make any two flags look alike.
    return name.lstrip("-").lower().replace("_", "-")
