"""Find the rank that failed first, and its own error message.

When one rank dies, the others lose their connection and fail within moments, often before the dead
one is noticed. So the first failure is not simply the earliest: a lost connection ranks after
anything that can have caused it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.errors import RapidformerError

# Set by the launcher: it shows errors once, instead of every process showing them.
QUIET_VARIABLE = "RAPIDFORMER_ERRORS_TO_PARENT"
_LOST_CONNECTION = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
    "Timed out waiting", "Timeout waiting", "remote process exited", "ncclRemoteError",
    "communicator was aborted", "Socket Timeout", "failed to recv", "DistNetworkError",
)  # fmt: skip

_CAUSES = {
    "SIGKILL": "usually because memory ran out",
    "SIGBUS": "a file that it had mapped was cut short, or shared memory or the disk is full",
}


class WorkerError(RapidformerError):
    """A process of the run has failed; carries its exit status."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_told = False
        """Whether another node shows it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a process ended that should not have."""

    rank: int
    node: int
    host: str
    nodes: int
    status: int
    """Its exit status; if negative, the signal that ended it."""
    time: float
    message: str | None = None
    is_mistake: bool = False
    """Whether the user has to fix something: the same command would fail again."""
    log: str | None = None

    @property
    def exit_code(self) -> int:
        if self.message is not None and self.status == -signal.SIGTERM:
            return 1  # it had already failed when the launcher ended it with the others
        return self.status if self.status > 0 else 128 - self.status

    @property
    def is_consequence(self) -> bool:
        """Whether this process merely lost another one."""
        if self.message is None:
            return self.status == -signal.SIGTERM  # the signal the launcher sends to the others
        return any(text in self.message for text in _LOST_CONNECTION)

    def describe(self) -> str:
        """What the user reads at the end."""
        who = f"rank {self.rank}"
        if self.nodes > 1:
            who += f" (node {self.node}, {self.host})"
        if self.message is None:
            where = f"; its output is in {self.log}" if self.log else ""
            if self.status >= 0:
                where = where or "; see its own message above"
                return f"{who} ended with status {self.status}{where}."
            # Real-time signals have no names.
            name = {int(each): each.name for each in signal.Signals}.get(-self.status)
            name = name or str(-self.status)
            hint = f" ({_CAUSES[name]})" if name in _CAUSES else ""
            return f"{who} was ended by signal {name}{hint}{where}."
        if self.message.startswith("Traceback"):
            return f"{who} failed:\n{self.message.rstrip()}"
        return self.message if self.rank == 0 and self.nodes == 1 else f"{who}: {self.message}"

    def summarize(self) -> str:
        """The same on one line."""
        lines = (self.describe() if self.message is None else self.message).rstrip().splitlines()
        line = lines[-1] if self.message and self.message.startswith("Traceback") else lines[0]
        return line if self.message is None else f"rank {self.rank}: {line}"


def choose_first(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time, failure.rank))


def report_failure(message: str, *, is_mistake: bool = False) -> bool:
    """In a worker: leave the message for the parent to show. False if there is no parent."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or QUIET_VARIABLE not in os.environ:
        return False
    now = time.time()
    # torch's own file format; anything it does not know goes into extraInfo.
    extra = {"timestamp": str(int(now)), "time": now, "is_mistake": is_mistake}
    content = {"message": {"message": message, "extraInfo": extra}}
    # The parent stops all ranks when one has failed, maybe in the middle of this, and torch cannot
    # read half a file.
    staged = Path(f"{path}.{os.getpid()}")
    staged.write_text(json.dumps(content), encoding="utf-8")
    staged.replace(path)
    return True


def read_report(path: str) -> dict[str, Any]:
    """What ``report_failure`` left: message, time and is_mistake; empty without a report."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        extra = content["extraInfo"]
        return {
            "message": str(content["message"]),
            "time": float(extra.get("time", extra["timestamp"])),
            "is_mistake": bool(extra.get("is_mistake")),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
