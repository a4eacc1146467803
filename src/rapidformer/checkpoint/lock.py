"""One lock per run folder: held by a living run, stale once that run is dead.

The lock is a small file that names its holder. A holder on this machine is alive if its process
is; one elsewhere is alive as long as it refreshes the file's time. File system locks (``flock``)
would be released by the kernel, but many shared file systems ignore them between machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rapidformer.checkpoint.finding import get_launch_name, is_restart
from rapidformer.checkpoint.publish import get_staging, publish, read_json
from rapidformer.errors import CheckpointError
from rapidformer.log import get_logger

LOCK_FILE = ".lock"
_BEAT_SECONDS = 10.0
_STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class _Holder:
    token: str
    host: str
    place: str
    """The processes that can see each other: the same boot of a machine, the same container."""
    pid: int
    started: str
    """When the process started, by the kernel: process numbers are used again."""
    launch: str
    """The launcher's name for the run, which its restarts keep."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderLock:
    """The lock of one folder; only rank 0 takes it."""

    def __init__(self, folder: Path, guarded: Path | None = None) -> None:
        """``guarded`` is the folder that users have named, if it is not a run's."""
        self.folder = folder
        self._guarded = guarded or folder
        self._other = "another folder" if guarded else "another --save folder"
        self._path = folder / LOCK_FILE
        pid = os.getpid()
        self._me = _Holder(
            token=uuid.uuid4().hex, host=socket.gethostname(), place=_find_place(), pid=pid,
            started=_find_start(pid) or "", launch=get_launch_name() or "",
        )  # fmt: skip
        self._draft = folder / f"{LOCK_FILE}-{self._me.token}"
        self._is_over = threading.Event()

    def acquire(self) -> None:
        """Take the lock, or say who has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as reason:
            raise CheckpointError(
                f"the folder {self._guarded} cannot be written to: {reason.strerror}. Choose "
                f"{self._other}."
            ) from None
        threading.Thread(target=self._beat, name="rapidformer-lock", daemon=True).start()

    def check(self) -> None:
        """Refuse to go on if another run has taken the folder (this one was suspended, say)."""
        holder = self._read()
        if holder is not None and holder.token != self._me.token:
            raise CheckpointError(
                f"{self._guarded} was taken over by another run ({holder}) while this one did not "
                f"respond: nothing more is saved here. Continue with {self._other}."
            )

    def release(self) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):
            if self._holds():
                self._path.unlink()

    def _holds(self) -> bool:
        holder = self._read()
        return holder is not None and holder.token == self._me.token

    def _take(self) -> None:
        self._draft.write_text(json.dumps(asdict(self._me)), encoding="utf-8")
        try:
            try:
                os.link(self._draft, self._path)  # fails if the lock exists, on NFS too
                return
            except FileExistsError:
                pass
            except OSError:
                if not self._path.exists():  # a file system without hard links
                    self._draft.replace(self._path)
                    return
            self._wait_for_stale()
            self._draft.replace(self._path)
            # Of two runs that replace a stale lock at once, the later one keeps it.
            time.sleep(_LOOK_SECONDS)
            self.check()
        finally:
            self._draft.unlink(missing_ok=True)

    def _wait_for_stale(self) -> None:
        """Return once the holder is known to be dead; raise if it lives."""
        first, began = None, time.monotonic()
        while (holder := self._read()) is not None and not self._is_mine_or_dead(holder):
            beat = self._get_beat()
            if holder.place == self._me.place or (first is not None and beat != first):
                raise CheckpointError(
                    f"{self._guarded} is in use by another run ({holder}): wait for it, stop it, "
                    f"or choose {self._other}."
                )
            # Never by one look: the clock may have been set forward, or back, since the last beat.
            watched = time.monotonic() - began
            is_old = watched > 2 * _BEAT_SECONDS and self._measure_age() > _STALE_SECONDS
            if is_old or watched > _STALE_SECONDS:
                return
            if first is None:
                get_logger().info(
                    f"waiting   {self._guarded} is locked by {holder}: it counts as dead "
                    f"after {_STALE_SECONDS:.0f} seconds without a sign of life"
                )
            first = beat
            time.sleep(_LOOK_SECONDS)

    def _is_mine_or_dead(self, holder: _Holder) -> bool:
        if holder.launch and holder.launch == self._me.launch and is_restart():
            return True  # the launcher starts another attempt only after the last one has ended
        if holder.place != self._me.place:
            return False
        return holder.pid == os.getpid() or _find_start(holder.pid) != holder.started

    def _read(self) -> _Holder | None:
        try:
            return _Holder(**read_json(self._path))
        except (CheckpointError, TypeError):
            return None

    def _get_beat(self) -> int:
        # Opened, not only looked at: NFS then asks the server instead of its cache.
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
        return 0

    def _measure_age(self) -> float:
        """Seconds since the last beat, by the file server's clock alone."""
        os.utime(self._draft)
        return (self._draft.stat().st_mtime_ns - self._get_beat()) / 1e9

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                if not self._holds():
                    return
                os.utime(self._path)


def is_held(folder: Path) -> bool | None:
    """Whether a live run holds a folder, by one look at its file and the clocks; None: no lock."""
    lock = FolderLock(folder)
    holder = lock._read()
    if holder is None:
        return None
    if holder.place == lock._me.place:
        return _find_start(holder.pid) == holder.started
    return time.time() - lock._get_beat() / 1e9 < _STALE_SECONDS


def _find_place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _find_start(pid: int) -> str | None:
    """When a process started; None if it has ended (a zombie has)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder to write to; it becomes ``target`` if the block ends without an error.

    A second export is refused while the first is alive, and each has a folder of its own: one whose
    lock was taken from it (it was suspended, say) publishes nothing of the other's.
    """
    home = get_staging(target)
    lock = FolderLock(home, target)
    lock.acquire()
    staging = home / uuid.uuid4().hex
    try:
        for left in home.iterdir():
            if not left.name.startswith(LOCK_FILE):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        staging.mkdir()
        yield staging
        lock.check()
        written = staging.stat().st_ino
        publish(target, staging=staging, with_manifest=False)
        if target.stat().st_ino != written:
            raise CheckpointError(
                f"{target} is not what was written: another program has replaced it. Export again."
            )
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        lock.release()
        with suppress(OSError):  # another process may be about to use it
            home.rmdir()
