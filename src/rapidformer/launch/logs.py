"""Write each rank's output to its own file as well as to the terminal.

The agent reads the output through pipes, so whatever a rank writes to either stream, from Python or
C, ends up in one file in order. If the terminal is a real one, node 0's first rank gets a terminal
too, so progress bars look as they do without a launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import selectors
import socket
import sys
import termios
import threading
import time
import tty
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class RankLogs(LogsSpecs):
    """Where the workers' streams and error files go. Without a folder, only to the terminal."""

    def __init__(self, scratch: Path, folder: Path | None, *, has_terminal: bool) -> None:
        super().__init__(log_dir=str(scratch))
        self._scratch, self._folder, self._has_terminal = scratch, folder, has_terminal
        self._pump: _Pump | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def root_log_dir(self) -> str:
        return str(self._scratch)

    def get_path(self, rank: int) -> str | None:
        """The log file of a rank; None without a folder."""
        return None if self._folder is None else str(self._folder / f"rank_{rank}.log")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch before each start of the workers."""
        destination = LogsDest()
        self.finish()
        if self._folder is not None:
            self._pump = _Pump()
        for local_rank, variables in envs.items():
            attempt = variables["TORCHELASTIC_RESTART_COUNT"]
            errors = self._scratch / f"error_{attempt}_{variables['RANK']}.json"
            errors.unlink(missing_ok=True)
            variables["TORCHELASTIC_ERROR_FILE"] = str(errors)
            destination.error_files[local_rank] = str(errors)
            out, err = self._open_streams(variables)
            destination.stdouts[local_rank], destination.stderrs[local_rank] = out, err
        if self._pump is not None:
            self._pump.start()
        return destination

    def _open_streams(self, variables: dict[str, str]) -> tuple[str, str]:
        if self._pump is None:
            return "", ""  # the agent's own
        path = Path(self.get_path(int(variables["RANK"])) or "")
        attempt, host = variables["TORCHELASTIC_RESTART_COUNT"], socket.gethostname()
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with path.open("a", encoding="utf-8") as file:
            file.write(f"=== {now}, host {host}, attempt {attempt} ===\n")
        is_shown = self._has_terminal and variables["RANK"] == "0"
        out, err = (
            self._pump.add(path, stream, wants_terminal=is_shown)
            for stream in (sys.stdout, sys.stderr)
        )
        return out, err

    def finish(self) -> None:
        """Flush what the workers left in the pipes."""
        if self._pump is not None:
            self._pump.stop()
            self._pump = None


class _LineLog:
    """Complete lines of one stream; of a line that is rewritten repeatedly, its last form."""

    def __init__(self, path: Path) -> None:
        # Both streams of a rank append to its file, in whole writes.
        self._file = path.open("ab", buffering=0)
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        # A trailing carriage return may be the first half of a line ending.
        self._rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if lines:
            self._file.write(b"".join(_clean(line) + b"\n" for line in lines))

    def close(self) -> None:
        if _clean(self._rest):
            self._file.write(_clean(self._rest) + b"\n")
        self._file.close()


def _clean(line: bytes) -> bytes:
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


class _Shown:
    """Forwards a rank's stream to the command's own; lines stay whole: several ranks share it."""

    def __init__(self, stream: Any, *, holds_lines: bool) -> None:
        self._stream, self._holds_lines = stream, holds_lines
        self._rest = b""

    def write(self, data: bytes) -> None:
        data = self._rest + data
        # A progress bar ends its line with a carriage return, repeatedly.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 if self._holds_lines else len(data)
        self._rest = data[end:]
        self._show(data[:end])

    def close(self) -> None:
        self._show(self._rest)

    def _show(self, data: bytes) -> None:
        if data:
            with contextlib.suppress(OSError, ValueError):  # nobody is reading any more
                self._stream.buffer.write(data)
                self._stream.flush()


class _Pump(threading.Thread):
    """Copies bytes from the workers to the terminal and to their log files."""

    def __init__(self) -> None:
        super().__init__(name="rapidformer-logs", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._ends: list[int] = []
        self._outputs: list[_LineLog | _Shown] = []
        self._is_stopping = threading.Event()

    def add(self, log_path: Path, shown_on: Any, *, wants_terminal: bool) -> str:
        """A new stream; returns the path that the worker opens."""
        is_terminal = wants_terminal and shown_on.isatty()
        if is_terminal:
            source, end = pty.openpty()
            tty.setraw(end)  # otherwise line endings would be converted twice
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(shown_on.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(end, termios.TIOCSWINSZ, size)
            path = os.ttyname(end)
        else:
            source, end = os.pipe()
            path = f"/proc/self/fd/{end}"
        os.set_blocking(source, False)
        self._ends += [source, end]
        outputs = _LineLog(log_path), _Shown(shown_on, holds_lines=not is_terminal)
        self._outputs += outputs
        self._selector.register(source, selectors.EVENT_READ, outputs)
        return path

    def run(self) -> None:
        while not self._is_stopping.is_set():
            self._carry(timeout=0.1)
        while self._carry(timeout=0):
            pass

    def stop(self) -> None:
        self._is_stopping.set()
        if self.ident is not None:
            self.join(timeout=10)
        for end in self._ends:
            os.close(end)
        for output in self._outputs:
            output.close()
        self._selector.close()

    def _carry(self, timeout: float) -> bool:
        has_read = False
        for key, _ in self._selector.select(timeout):
            with contextlib.suppress(OSError):
                if data := os.read(key.fd, 65536):
                    has_read = True
                    for output in key.data:
                        output.write(data)
        return has_read
