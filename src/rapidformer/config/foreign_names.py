"""What becomes of a name that another system's users write: one row each.

The tables (``hugging_face_names.py``, ``flagai_names.py``) are the only place that knows a
system's names. The trainers translate by them, and ``docs/coming_from.md`` is made from them.
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
    """Our name for it; empty where several settings, or none, stand for it."""
    note: str = ""
    """One sentence for the user: the difference, or the reason."""


def mapped(setting: str, note: str = "") -> ForeignName:
    """The value is handed to this setting of ours as it is."""
    return ForeignName("mapped", setting, note)


def honoured(note: str, setting: str = "") -> ForeignName:
    """It means what it means there; the trainer sees to it."""
    return ForeignName("honoured", setting, note)


def ignored(reason: str) -> ForeignName:
    """Accepted without effect; said once where a value other than the default is given."""
    return ForeignName("ignored", "", reason)


def refused(reason: str) -> ForeignName:
    """An error where a value other than the default is given."""
    return ForeignName("refused", "", reason)
