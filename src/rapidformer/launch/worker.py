"""What a process does first when our launcher has started it; no torch, so it is done at once.

It is tied to the launcher (should that be killed outright, the kernel ends this process too), it
answers the stack signal, and it has a heartbeat from the start.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path

# The folder where heartbeats stand; rapidformer.dist.heartbeat reads the same variable.
HEARTBEAT_VARIABLE = "RAPIDFORMER_HEARTBEATS"
# One that neither Slurm (USR1, USR2) nor anything else sends.
STACK_SIGNAL = signal.SIGRTMIN + 7
_PR_SET_PDEATHSIG = 1


def get_beat_path(folder: Path, rank: int) -> Path:
    return folder / f"beat_{rank}"


def get_stack_path(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}"


def attach_to_launcher() -> None:
    """Do nothing under other launchers, or without one."""
    name = os.environ.get(HEARTBEAT_VARIABLE)
    if name is None or "RANK" not in os.environ:
        return
    folder, rank = Path(name), int(os.environ["RANK"])
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher or not folder.is_dir():
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher died in between
    # Kept open for good: the handler writes to it whenever the signal comes.
    stacks = get_stack_path(folder, rank).open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    line = f"0 0 start {time.monotonic():.3f} 0"
    get_beat_path(folder, rank).write_text(line.ljust(127) + "\n", encoding="ascii")
