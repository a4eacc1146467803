"""What a launched process does first, without torch: tie itself to its launcher, and beat."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Literal

# The folder with the heartbeat files; rapidformer.dist.heartbeat reads the same variable.
HEARTBEAT_VARIABLE = "RAPIDFORMER_HEARTBEATS"
# The process that a run must not outlive; a sweep sets it for its trials.
PARENT_VARIABLE = "RAPIDFORMER_PARENT"
# A signal that neither Slurm (USR1, USR2) nor anything else sends.
STACK_SIGNAL = signal.SIGRTMIN + 7
_PR_SET_PDEATHSIG = 1


def get_rank_file(kind: Literal["beat", "stack", "saving"], folder: Path, rank: int) -> Path:
    """A rank's file. ``saving`` exists while a signal makes it save (``dist/heartbeat.py``)."""
    return folder / f"{kind}_{rank}"


def die_with_parent() -> None:
    """A trial ends with its sweep: it would hold the folder in which it is to be resumed."""
    if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def attach_to_launcher() -> None:
    """Does nothing under other launchers, or without one."""
    name = os.environ.get(HEARTBEAT_VARIABLE)
    if name is None or "RANK" not in os.environ:
        return
    folder, rank = Path(name), int(os.environ["RANK"])
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher or not folder.is_dir():
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher died in between
    # Kept open for good: the signal handler writes to it.
    stacks = get_rank_file("stack", folder, rank).open("a", encoding="utf-8")
    # Ignored where faulthandler is not there: a rank that is about to exit must not be ended by it.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    line = f"0 0 start {time.monotonic():.3f} 0"
    get_rank_file("beat", folder, rank).write_text(line.ljust(127) + "\n", encoding="ascii")
