"""Where the output of a run goes that another command has started."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_output_to(path: Path) -> None:
    """Send the run's output to a file, which is of interest only if the run fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
