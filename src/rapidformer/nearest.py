"""The name that somebody meant, where one is near enough to be meant at all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Two letters in eight may differ. Names further apart share letters, not meaning.
_LEAST_LIKENESS = 0.75


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is a likely spelling of this one; None where none is."""
    words = {_normalize(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_normalize(name), words, n=1, cutoff=_LEAST_LIKENESS)
    return words[found[0]] if found else None


def _normalize(name: str) -> str:
    # Dashes are not letters: they would make every two flags alike.
    return name.lstrip("-").lower().replace("_", "-")
