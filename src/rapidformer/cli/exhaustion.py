"""Errors that are nobody's bug: memory, the disk or file handles have run out."""

from __future__ import annotations

import errno

_MEMORY = (
    "use a smaller --micro-batch-size (--global-batch-size keeps the result the same), "
    "--checkpoint-activations, or --zero-3-memory-optimization on several GPUs"
)
_DISK = {
    errno.ENOSPC: "free some space, or inodes",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a folder that can be written to",
    errno.EMFILE: "raise the limit with `ulimit -n`",
    errno.ENFILE: "close other programs",
}


def describe_exhaustion(error: BaseException) -> str | None:
    """One sentence with a way out; None for any other error."""
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.errno in _DISK:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}: {_DISK[error.errno]}."
    # torch's error for GPUs by name: importing torch here would make every command slow.
    if type(error).__name__ == "OutOfMemoryError":
        return f"GPU memory ran out: {text} To fit, {_MEMORY}."
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"host memory ran out{': ' + text if text else ''}. To fit, {_MEMORY}."
    return None
