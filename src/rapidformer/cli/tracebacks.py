"""Tracebacks of errors in a user's script, without the library's frames around it."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import TracebackType

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = {"site-packages", "dist-packages"}  # anywhere: a user may have packages, too


def shorten(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script on; without our frames if the error is in the script itself.

    It may be in a library that the script calls, but if our own code is between the two, all is
    shown: the error may be ours.
    """
    entries = _list_entries(trace)
    runs = [index for index, entry in enumerate(entries) if _get_module(entry) == "runpy"]
    if not runs:
        return trace
    entries = entries[runs[-1] + 1 :]
    own = [index for index, entry in enumerate(entries) if _is_ours(entry)]
    script = [index for index, entry in enumerate(entries) if _is_script(entry)]
    if script and (not own or own[-1] < script[-1]):
        entries = [entry for entry in entries if not _is_ours(entry)]
    shortened = None
    for entry in reversed(entries):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened or trace


def _list_entries(trace: TracebackType | None) -> list[TracebackType]:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _get_module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__"))


def _is_ours(entry: TracebackType) -> bool:
    return _get_module(entry).partition(".")[0] == "rapidformer"


def _is_script(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    is_library = file.startswith((_STANDARD_LIBRARY, "<")) or _INSTALLED & set(Path(file).parts)
    return not is_library and not _is_ours(entry)
