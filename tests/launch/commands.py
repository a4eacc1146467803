"""The command in a process of its own, forked from the test's: torch is imported already.

What the command starts in turn are real processes, or forks as well with ``python``, the fixture of
that name. A command may be put into a network namespace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.processes import PATIENCE, wait_until
from tests.warm_python import CLONE_NEWNET

# What a launcher around the tests may have left behind.
FOREIGN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
    "RAPIDFORMER_NODE", "RAPIDFORMER_FLAGS",
)  # fmt: skip


class Command:
    """``rapidformer <words>``, started."""

    def __init__(
        self,
        folder: Path,
        *words: object,
        namespace: str | None = None,
        python: Path | None = None,
        **variables: str,
    ) -> None:
        self._files = [folder / f"{id(self)}.out", folder / f"{id(self)}.err"]
        for path in self._files:
            path.touch()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            sys.executable = str(python or sys.executable)
            self._become([str(word) for word in words], namespace, variables)

    def _become(self, words: list[str], namespace: str | None, variables: dict[str, str]) -> None:
        status = 70
        try:
            os.setsid()
            for number, path in enumerate(self._files, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for name in FOREIGN:
                os.environ.pop(name, None)
            os.environ.update(variables)
            # A launcher that is killed outright leaves its scratch folder.
            tempfile.tempdir = os.environ["TMPDIR"] = str(self._files[0].parent)
            if namespace is not None:
                with Path(f"/run/netns/{namespace}").open() as file:
                    assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
            from rapidformer.cli.main import main

            status = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        """Standard error, without what torch's C++ side says of sockets without names."""
        lines = self._files[1].read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[W"))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is None

    def wait(self, seconds: float = PATIENCE) -> int:
        wait_until(lambda: not self.is_running(), seconds, self.describe)
        assert self.status is not None
        return self.status

    def describe(self) -> str:
        return f"out:\n{self.out}\nerr:\n{self.err}"

    def end(self) -> None:
        """Leave nothing behind, whatever the test found."""
        if self.is_running():
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
