"""What happens to a name of another system: one row each.

The tables (``hugging_face_names.py``, ``flagai_names.py``) are the only place that knows a system's
names. The trainers use them to translate; ``docs/generate.py`` renders them for the docs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["mapped", "honoured", "ignored", "refused"]


@dataclass(frozen=True)
class ForeignName:
    """One name of another system, and what it does here."""

    outcome: Outcome
    setting: str = ""
    """Our name for it; empty if it stands for several settings or none."""
    note: str = ""
    """One sentence for the user: the difference, or the reason."""


def mapped(setting: str, note: str = "") -> ForeignName:
    """The value is passed to this setting of ours unchanged."""
    return ForeignName("mapped", setting, note)


def honoured(note: str, setting: str = "") -> ForeignName:
    """It means the same as there; the trainer implements it."""
    return ForeignName("honoured", setting, note)


def ignored(reason: str) -> ForeignName:
    """Accepted without effect; reported once if a non-default value is given."""
    return ForeignName("ignored", "", reason)


def refused(reason: str) -> ForeignName:
    """An error if a non-default value is given."""
    return ForeignName("refused", "", reason)
