"""A checkpoint on its way to disk: every rank writes its own files, rank 0 publishes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch.distributed as dist

from rapidformer.checkpoint.disk_space import warn_if_full
from rapidformer.checkpoint.finding import TRACKER, find_checkpoints
from rapidformer.checkpoint.hashing import Digest, HashedFile
from rapidformer.checkpoint.pieces import Piece, WrittenPiece, finish_tensors, write_pieces
from rapidformer.checkpoint.publish import get_staging, publish, replace_text, withdraw
from rapidformer.checkpoint.state import get_rank
from rapidformer.checkpoint.writing import writing
from rapidformer.dist.collectives import broadcast_object, gather_on_first
from rapidformer.errors import CheckpointError, WriteError

STATE = "state"


def _do_nothing() -> None: ...


@dataclass(kw_only=True)
class Save:
    """A checkpoint that is ready to be written."""

    folder: Path
    """The run's."""
    step: int
    pieces: list[Piece]
    """This rank's part of the tensors; they share memory with the model until they are copied."""
    files: dict[str, str]
    """This rank's other files, by name."""
    total_bytes: int
    """Of all ranks' pieces."""
    keep: int | None = None
    """How many checkpoints are kept; all by default."""
    protected: Path | None = None
    """A checkpoint that is kept in any case."""
    before_publishing: Callable[[], None] = _do_nothing
    """Called on rank 0 when all is written; it may raise."""
    after_publishing: Callable[[], None] = _do_nothing
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    """Ends the writing early, as a failure."""
    is_behind: bool = False
    """Whether training continued while it was written."""
    write_seconds: float = 0.0

    @property
    def target(self) -> Path:
        return self.folder / f"iter_{self.step:07d}"

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write and publish the checkpoint; every rank must call this, and all fail if one does."""
        started = time.monotonic()
        own, failure = _Written(), None
        # Whatever went wrong is exchanged first: no rank may wait for one that has given up.
        try:
            with writing(self.folder):
                own = self._write_own_files()
        except Exception as error:
            failure = error
        everyone = gather_on_first((own, self._describe(failure)), group)
        if everyone is not None:
            failure = failure or next((problem for _, problem in everyone if problem), None)
            try:
                with writing(self.folder):
                    if failure is None:
                        self._publish([written for written, _ in everyone])
            except Exception as error:
                failure = error
        problem = broadcast_object(self._describe(failure), group)
        self.write_seconds = time.monotonic() - started
        if failure is not None or problem is not None:
            raise failure or cast(Exception, problem)

    def _write_own_files(self) -> _Written:
        staging, written = get_staging(self.target), _Written()
        (staging / STATE).mkdir(exist_ok=True)  # also here: NFS may not show rank 0's folder yet
        if self.pieces:
            written.pieces, digest = write_pieces(
                self.pieces, staging / STATE, get_rank(), self._check_cancelled
            )
            written.digests[f"{STATE}/{written.pieces[0].part.file}"] = digest
        for name, text in self.files.items():
            with HashedFile(staging / name) as file:
                file.write(text.encode("utf-8"))
            written.digests[name] = file.digest
        return written

    def _publish(self, everyone: list[_Written]) -> None:
        finish_tensors(
            (piece for written in everyone for piece in written.pieces),
            get_staging(self.target) / STATE,
        )
        digests = {k: v for written in everyone for k, v in written.digests.items()}
        self.before_publishing()
        publish(self.target, digests=digests)
        replace_text(self.folder / TRACKER, str(self.step))
        self._drop_old()
        self.after_publishing()
        warn_if_full(self.folder, self.total_bytes)

    def _drop_old(self) -> None:
        # The one just saved is the newest, even if a run that went back has later steps there.
        older = [path for path in find_checkpoints(self.folder) if path != self.target]
        for path in [*older, self.target][: -self.keep] if self.keep else []:
            if path != self.protected:
                withdraw(path)

    def _check_cancelled(self) -> None:
        if self.is_cancelled.is_set():
            raise WriteError(str(self.folder), "the run was stopped")

    def _describe(self, failure: Exception | None) -> CheckpointError | None:
        """The failure as other ranks should raise it."""
        if failure is None or isinstance(failure, CheckpointError):
            return failure
        reason = f"rank {get_rank()} failed with {type(failure).__name__}: {failure}"
        return WriteError(str(self.folder), reason)


@dataclass
class _Written:
    """What one rank has written."""

    pieces: list[WrittenPiece] = field(default_factory=list)
    digests: dict[str, Digest] = field(default_factory=dict)
