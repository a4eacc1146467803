"""Compressed files as plain bytes: gzip by Python itself, zstd by Python 3.14 or `zstandard`.

A truncated archive must fail. The zstandard package's own reader takes the end of the file for the
end of the data, so it is not used.
"""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rapidformer.errors import DataError, MissingPackageError, RapidformerError

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_PACKED_BYTES = 1 << 17


def get_compression(path: Path) -> str | None:
    """gzip, zstd or None, from the file's first bytes."""
    with path.open("rb") as file:
        start = file.read(4)
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def open_decompressed(raw: IO[bytes], compression: str | None) -> IO[bytes]:
    """The bytes of an open file, decompressed while reading; ``raw`` stays the caller's."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if compression == "zstd":
        return _open_zstd(raw)
    return raw


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Report a damaged archive; our own errors and those of the system pass unchanged."""
    try:
        yield
    except Exception as error:  # zlib's, zstd's and gzip's errors share no base class
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if is_of_system or isinstance(error, RapidformerError):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{path} is damaged and cannot be unpacked to its end: {reason}. Fetch it again."
        ) from error


def _open_zstd(raw: IO[bytes]) -> IO[bytes]:
    with contextlib.suppress(ImportError):
        from compression import zstd

        opened: IO[bytes] = zstd.open(raw, "rb")
        return opened
    try:
        import zstandard
    except ImportError:
        name = getattr(raw, "name", "a .zst file")
        raise MissingPackageError("zstandard", f"Reading {name}", extra="zstd") from None
    return io.BufferedReader(_ZstdFile(raw, zstandard.ZstdDecompressor()), _PACKED_BYTES)


class _ZstdFile(io.RawIOBase):
    """Frame after frame, each to its own end."""

    def __init__(self, raw: IO[bytes], decompressor: Any) -> None:
        self._raw = raw
        self._decompressor = decompressor
        self._frame: Any = decompressor.decompressobj()
        self._has_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = b""
            if self._frame.eof:
                packed = self._frame.unused_data
                self._frame, self._has_begun = self._decompressor.decompressobj(), False
            packed = packed or self._raw.read(_PACKED_BYTES)
            if not packed:
                if self._has_begun:
                    raise EOFError("the file ends in the middle of its data")
                return 0
            self._has_begun = True
            self._ready = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
