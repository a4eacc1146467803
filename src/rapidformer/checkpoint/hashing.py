"""Hash a file while it is written, so that nobody has to read it again for its manifest."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Digest:
    """What a manifest says about a file."""

    size: int
    sha256: str


class HashedFile(io.BufferedWriter):
    """A new file; once closed, it is on disk and ``digest`` says what was written."""

    digest: Digest

    def __init__(self, path: Path) -> None:
        self._hashing = _HashingFile(path, "xb")
        super().__init__(self._hashing)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
            os.fsync(self.fileno())
            self.digest = Digest(self.tell(), self._hashing.hash.hexdigest())
        finally:
            self.close()


class _HashingFile(io.FileIO):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.hash.update(memoryview(data)[:count])
        return count


def hash_file(path: Path, advance: Callable[[int], None] = lambda count: None) -> Digest:
    """The digest of a file that is there already; ``advance`` is called with bytes read."""
    size, digest = 0, hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            digest.update(chunk)
            advance(len(chunk))
    return Digest(size, digest.hexdigest())
