"""How a failure is shown: what has run out, or a traceback without the library's frames."""

from __future__ import annotations

import errno
import sysconfig
from pathlib import Path
from types import TracebackType

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = {"site-packages", "dist-packages"}  # anywhere: a user may have packages, too
_MEMORY = (
    "use a smaller --micro-batch-size (--global-batch-size keeps the result the same), "
    "--checkpoint-activations, or --zero-3-memory-optimization on several GPUs"
)
_DISK = {
    errno.ENOSPC: "free some space, or inodes", errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a folder that can be written to",
    errno.EMFILE: "raise the limit with `ulimit -n`", errno.ENFILE: "close other programs",
    errno.ENAMETOOLONG: "give a shorter name",
}  # fmt: skip


def shorten(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script on; without our frames, unless the error may be ours."""
    entries, following = [], trace
    while following is not None:
        entries.append(following)
        following = following.tb_next
    runs = [index for index, entry in enumerate(entries) if _get_module(entry) == "runpy"]
    if not runs:
        return trace
    entries = entries[runs[-1] + 1 :]
    ours = [index for index, entry in enumerate(entries) if _is_ours(entry)]
    script = [index for index, entry in enumerate(entries) if _is_script(entry)]
    if script and (not ours or ours[-1] < script[-1]):
        entries = [entry for entry in entries if not _is_ours(entry)]
    shortened = None
    for entry in reversed(entries):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened or trace


def _get_module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__"))


def _is_ours(entry: TracebackType) -> bool:
    return _get_module(entry).partition(".")[0] == "rapidformer"


def _is_script(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    is_library = file.startswith((_STANDARD_LIBRARY, "<")) or _INSTALLED & set(Path(file).parts)
    return not is_library and not _is_ours(entry)


def describe_exhaustion(error: BaseException) -> str | None:
    """One sentence with a way out; None for any other error."""
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.errno in _DISK:
        name = str(error.filename or "")
        where = f" ({name[:100]}{'...' * (len(name) > 100)})" if name else ""
        return f"{error.strerror}{where}: {_DISK[error.errno]}."
    if isinstance(error, RuntimeError) and text == "Could not determine home directory.":
        return (
            "a path begins with ~ and the name of a user who is not on this machine: write the "
            "path in full, or ./~... for a file of that name."
        )
    # torch's error for GPUs by name: importing torch here would make every command slow.
    if type(error).__name__ == "OutOfMemoryError":
        return f"GPU memory ran out: {text} To fit, {_MEMORY}."
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"host memory ran out{': ' + text if text else ''}. To fit, {_MEMORY}."
    return None
