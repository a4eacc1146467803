"""Which files are read, in which order, and of what kind each is.

Compression is detected from a file's first bytes, not from its name, and so is the kind if the name
says nothing. A folder contributes its files with known names, sorted by path; files named one by
one keep their order. gzip is read by Python itself, zstd by Python 3.14 or `zstandard`.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rapidformer.errors import ConfigurationError, DataError, MissingPackageError, RapidformerError
from rapidformer.hub import suggest_path
from rapidformer.log import get_logger

_KINDS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet",
    ".txt": "text", ".text": "text",
}  # fmt: skip
_COMPRESSED = (".gz", ".zst")
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_PACKED_BYTES = 1 << 17
_SNIFFED_BYTES = 1 << 16


@dataclass(frozen=True)
class Source:
    """One input file. ``kind`` is json, json-array, text or parquet."""

    path: Path
    kind: str
    compression: str | None
    size: int
    modified: int


def find_sources(inputs: tuple[str, ...]) -> list[Source]:
    """Every file that the inputs name: files, patterns and folders."""
    problems: list[str] = []
    paths = [path for text in inputs for path in _expand(text, problems)]
    sources: list[Source] = []
    for path in paths:
        try:
            sources.append(_describe_source(path))
        except RapidformerError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"--input {path} cannot be read: {error.strerror}.")
    if not inputs:
        problems.append("--input is missing: name files, patterns or folders.")
    if problems:
        raise ConfigurationError(problems)
    for path, count in Counter(paths).items():
        if count > 1:
            get_logger().warning("%s is given %d times: so are its documents.", path, count)
    return sources


def _expand(text: str, problems: list[str]) -> Iterator[Path]:
    path = Path(text).expanduser()
    if path.is_dir():
        files = sorted(
            child
            for child in path.rglob("*")
            if not any(part.startswith(".") for part in child.relative_to(path).parts)
            if _get_kind_by_name(child) is not None and child.is_file()
        )
        if not files:
            problems.append(
                f"--input {text}: the folder holds no file with a name such as *.jsonl, *.txt or "
                "*.parquet (also with .gz or .zst behind it)."
            )
        yield from files
    elif path.exists():
        yield path
    elif glob.has_magic(text):
        # `Path.glob` needs a folder to start from; a user's pattern may be absolute or not.
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
        files = [match for match in matches if match.is_file()]
        if not files:
            problems.append(f"--input {text}: no file matches this pattern.")
        yield from files
    else:
        problems.append(f"--input {text}: no such file or folder.{suggest_path(path)}")


def _get_kind_by_name(path: Path) -> str | None:
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return _KINDS.get(Path(name).suffix)


def _describe_source(path: Path) -> Source:
    status = path.stat()
    with path.open("rb") as raw, explain_damage(path):
        magic = raw.read(4)
        raw.seek(0)
        compression = next((name for key, name in _MAGIC.items() if magic.startswith(key)), None)
        start = open_decompressed(raw, compression).read(_SNIFFED_BYTES)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    kind = "parquet" if start.startswith(b"PAR1") else _get_kind_by_name(path)
    if kind == "parquet" and start and not start.startswith(b"PAR1"):
        raise DataError(f"--input {path} is not a Parquet file: its first bytes are {start[:4]!r}.")
    if kind == "parquet" and compression is not None:
        raise DataError(f"--input {path}: unpack it first; Parquet is compressed inside.")
    if kind is None:
        kind = "json" if text.startswith(b"{") else _check_is_text(path, start)
    if kind == "json" and text.startswith(b"["):
        kind = "json-array"
    return Source(path, kind, compression, status.st_size, status.st_mtime_ns)


def _check_is_text(path: Path, start: bytes) -> str:
    with contextlib.suppress(UnicodeDecodeError):
        # The last character may be cut in the middle.
        start[: max(len(start) - 3, 0) if len(start) == _SNIFFED_BYTES else len(start)].decode()
        if b"\0" not in start:
            return "text"
    raise DataError(
        f"--input {path} is neither JSON lines nor UTF-8 text nor Parquet, packed or not: it "
        f"begins with {start[:8]!r}."
    )


# --- compressed files ----------------------------------------------------------------------------


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

        return zstd.open(raw, "rb")
    try:
        import zstandard
    except ImportError:
        name = getattr(raw, "name", "a .zst file")
        raise MissingPackageError("zstandard", f"Reading {name}", extra="zstd") from None
    return io.BufferedReader(_ZstdFile(raw, zstandard.ZstdDecompressor()), _PACKED_BYTES)


class _ZstdFile(io.RawIOBase):
    """Frame after frame, so that a truncated archive fails; the package's own reader would not."""

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
