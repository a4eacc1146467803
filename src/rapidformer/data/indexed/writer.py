"""Write a ``.bin/.idx`` pair, byte for byte as Megatron does.

Nothing has its final name before ``finalize``. Both files grow next to the target under a temporary
name; then an older ``.idx`` of that name is removed, the ``.bin`` is renamed, and the ``.idx``
last, so that an index is never next to another file's tokens.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import numpy as np

from rapidformer.data.indexed.layout import (
    DTYPES,
    HEADER,
    MAX_SEQUENCE,
    MMAP_MAGIC,
    OFFSET_DTYPE,
    SIZE_DTYPE,
    VERSION,
    IndexedDataError,
    get_data_path,
    get_index_path,
    name_target,
)

_BLOCK = 1 << 20
_FULL = {errno.ENOSPC: "the disk is full", errno.EFBIG: "the file may not grow further"}
_FULL[getattr(errno, "EDQUOT", errno.ENOSPC)] = _FULL[errno.ENOSPC]
Tokens = np.ndarray | Sequence[int]


class IndexedWriter:
    """Writes sequences and documents; ``fsync=False`` is for parts that could be rewritten."""

    def __init__(self, prefix: str | Path, dtype: Any = np.int32, *, fsync: bool = True) -> None:
        self.prefix = name_target(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {known: code for code, known in DTYPES.items()}
        if self.dtype not in codes:
            names = ", ".join(known.name for known in codes)
            raise IndexedDataError(
                f"tokens cannot be stored as {self.dtype.name}: use one of {names}."
            )
        self._code = codes[self.dtype]
        self._fsync = fsync
        # Arrays of machine integers: a list of ten million Python integers would take 400 MB.
        self._sizes = array("i")
        self._marks = array("q", [0])
        self._modes = bytearray()
        self.num_tokens = 0
        self._file: BinaryIO | None = None
        self._data_path = get_data_path(self.prefix)
        self._index_path = get_index_path(self.prefix)
        with self._watch_disk(self._data_path):
            self._data_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_staging(self._data_path)

    @property
    def num_sequences(self) -> int:
        return len(self._sizes)

    @property
    def num_documents(self) -> int:
        return len(self._marks) - 1

    def add_item(self, tokens: Tokens) -> None:
        """Write one sequence of the current document."""
        _check_length(len(tokens))
        flat = _convert_tokens(tokens, self.dtype)
        self._write(flat)
        self._sizes.append(flat.size)

    def end_document(self) -> None:
        """End the current document; one without sequences counts too."""
        self._marks.append(len(self._sizes))

    def add_document(self, tokens_flat: Tokens, sizes: Sequence[int] | np.ndarray) -> None:
        """Write a whole document, given its tokens and the length of each sequence."""
        self.add_batch(tokens_flat, sizes, [len(sizes)])

    def add_batch(
        self,
        tokens_flat: Tokens,
        sizes: Sequence[int] | np.ndarray,
        sequences_per_document: Sequence[int] | np.ndarray,
    ) -> None:
        """Write many whole documents in one call, or nothing if the arguments are inconsistent."""
        lengths = _convert_counts(sizes, "sizes")
        counts = _convert_counts(sequences_per_document, "sequences_per_document")
        _check_length(int(lengths.max(initial=0)))
        flat = _convert_tokens(tokens_flat, self.dtype)
        if (total := int(lengths.sum())) != flat.size:
            raise IndexedDataError(f"{flat.size} tokens were given, but the sizes add to {total}.")
        if (total := int(counts.sum())) != lengths.size:
            raise IndexedDataError(
                f"{lengths.size} sizes were given, but sequences_per_document adds to {total}."
            )
        if len(self._sizes) != self._marks[-1]:
            raise IndexedDataError("end the current document before adding whole ones.")
        self._write(flat)
        first = len(self._sizes)
        self._sizes.frombytes(lengths.astype(np.intc).tobytes())
        self._marks.frombytes((np.cumsum(counts, dtype=np.int64) + first).tobytes())

    def _write(self, flat: np.ndarray) -> None:
        file = self._get_file()
        with self._watch_disk(self._data_path):
            file.write(flat.data)
        self.num_tokens += flat.size

    def append_file(
        self, data: Path, sizes: np.ndarray, doc_idx: np.ndarray, modes: np.ndarray | None
    ) -> None:
        """Append another pair as it is; the caller checks its type and index."""
        with data.open("rb") as source, self._watch_disk(self._data_path):
            shutil.copyfileobj(source, self._get_file(), 16 * _BLOCK)
            self.num_tokens += source.tell() // self.dtype.itemsize
        first = len(self._sizes)
        for start in range(0, sizes.size, _BLOCK):
            self._sizes.frombytes(sizes[start : start + _BLOCK].astype(np.intc).tobytes())
        for start in range(1, doc_idx.size, _BLOCK):
            marks = doc_idx[start : start + _BLOCK] + first
            self._marks.frombytes(marks.astype(np.int64).tobytes())
        if modes is not None:
            self._modes += modes.tobytes()

    def finalize(self) -> None:
        """Write the index and give both files their names."""
        file = self._get_file()
        if len(self._sizes) != self._marks[-1]:
            unfinished = len(self._sizes) - self._marks[-1]
            raise IndexedDataError(
                f"{self.prefix}: the last {unfinished} of {len(self._sizes)} sequences belong to "
                "no document; call end_document() before finalize()."
            )
        with self._watch_disk(self._data_path):
            self._flush(file)
        staging = get_staging(self._index_path)
        with self._watch_disk(self._index_path), staging.open("wb") as index:
            self._write_index(index)
            self._flush(index)
        with self._watch_disk(self._data_path):
            self._index_path.unlink(missing_ok=True)
            get_staging(self._data_path).replace(self._data_path)
            staging.replace(self._index_path)
        self._file = None
        file.close()
        if self._fsync:
            force_folder(self._data_path.parent)

    def _flush(self, file: BinaryIO) -> None:
        file.flush()
        if self._fsync:
            os.fsync(file.fileno())

    def discard(self) -> None:
        """Remove what was written; an older pair of that name stays."""
        if self._file is None:
            return
        file, self._file = self._file, None
        for path in (self._data_path, self._index_path):
            get_staging(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk also refuses the last buffer
            file.close()

    def _write_index(self, file: BinaryIO) -> None:
        count = len(self._sizes)
        file.write(HEADER.pack(MMAP_MAGIC, VERSION, self._code, count, len(self._marks)))
        sizes = np.frombuffer(self._sizes, np.intc)
        for start in range(0, count, _BLOCK):
            file.write(sizes[start : start + _BLOCK].astype(SIZE_DTYPE).tobytes())
        end = 0
        for start in range(0, count, _BLOCK):
            lengths = sizes[start : start + _BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = np.cumsum(lengths) + end
            file.write((ends - lengths).astype(OFFSET_DTYPE).tobytes())
            end = int(ends[-1])
        marks = np.frombuffer(self._marks, np.int64)
        for start in range(0, marks.size, _BLOCK):
            file.write(marks[start : start + _BLOCK].astype(OFFSET_DTYPE).tobytes())
        file.write(self._modes)

    def _get_file(self) -> BinaryIO:
        if self._file is None:
            raise IndexedDataError(f"{self.prefix} is closed: nothing can be added to it.")
        return self._file

    @contextlib.contextmanager
    def _watch_disk(self, path: Path) -> Iterator[None]:
        """Turn a disk error into one that names the file, and remove what was written."""
        try:
            yield
        except OSError as error:
            free = 0
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(path.parent).free
            self.discard()
            reason = _FULL.get(error.errno or 0, error.strerror or str(error))
            what = f"{path} cannot be written: {reason}."
            if error.errno not in _FULL:
                raise IndexedDataError(what) from error
            data_bytes = self.num_tokens * self.dtype.itemsize
            index_bytes = HEADER.size + 12 * len(self._sizes) + 8 * len(self._marks)
            raise IndexedDataError(
                f"{what} The {self.num_sequences:,} sequences before this point need "
                f"{data_bytes + index_bytes:,} bytes (.bin {data_bytes:,}, .idx {index_bytes:,}), "
                f"and {free:,} more were free there; what was written is removed. Make room or "
                "choose another place."
            ) from error

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        elif self._file is not None:
            try:
                self.finalize()
            except BaseException:
                self.discard()
                raise


def choose_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The smallest type for a vocabulary's ids, by Megatron's rule."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def _convert_tokens(tokens: Sequence[int] | np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The tokens in a type that holds each of them exactly: NumPy would wrap a large id around."""
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise IndexedDataError(
            f"tokens have the shape {values.shape}: a sequence has one dimension."
        )
    if values.dtype == dtype or values.size == 0:
        return np.ascontiguousarray(values, dtype)
    if dtype.kind == "f" and values.dtype.kind == "f":
        return values.astype(dtype)
    if values.dtype.kind not in "iu":
        raise IndexedDataError(f"tokens are {values.dtype}: ids are whole numbers.")
    low, high = int(values.min()), int(values.max())
    if dtype.kind == "f":
        most = 2 ** (int(np.finfo(dtype).nmant) + 1)  # beyond this, floats skip integers
        least = -most
    else:
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if low < least or high > most:
        raise IndexedDataError(
            f"token id {low if low < least else high} does not fit {dtype.name} ({least} to "
            f"{most}): take the type from choose_dtype(vocab_size), with the size of the "
            "tokenizer's whole vocabulary."
        )
    return values.astype(dtype)


def _convert_counts(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Lengths or sequence counts as int64."""
    counts = np.asarray(values)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise IndexedDataError(
            f"{name} are {counts.dtype} of shape {counts.shape}: give a list of whole numbers."
        )
    if counts.size and counts.min() < 0:
        raise IndexedDataError(f"{name} hold {counts.min()}: a count is not negative.")
    return counts.astype(np.int64)


def _check_length(size: int) -> None:
    if size > MAX_SEQUENCE:
        raise IndexedDataError(
            f"a sequence of {size} tokens is too long for the index, which holds lengths up to "
            f"{MAX_SEQUENCE}: split the document."
        )


_BUFFER = 1 << 20
# Dropped writers disappear; a forked worker sees none of its parent's, since it lacks the lock.
_open_here: WeakValueDictionary[tuple[int, int, int], BinaryIO] = WeakValueDictionary()


def get_staging(target: Path) -> Path:
    """Where a file is written before it gets its final name."""
    return target.with_name(f".{target.name}.part")


def open_staging(target: Path) -> BinaryIO:
    """An empty file next to its target that nobody else writes; a leftover is overwritten."""
    path = get_staging(target)
    # Before opening the file: closing a second descriptor would release the first one's lock.
    other = _open_here.get(_get_key(path)) if path.exists() else None
    if other is not None and not other.closed:
        raise IndexedDataError(
            f"{target} is being written by this process already: finalize() or discard() the other "
            "writer first."
        )
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb", buffering=_BUFFER)
        try:
            _lock(file, target)
            # Whoever held the lock may have renamed the file meanwhile.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                file.truncate(0)
                _open_here[_get_key(path)] = file
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def force_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _get_key(path: Path) -> tuple[int, int, int]:
    place = path.stat()
    return os.getpid(), place.st_dev, place.st_ino


def _lock(file: BinaryIO, target: Path) -> None:
    try:
        # A record lock ends with this process, whatever its forked workers still hold open.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise IndexedDataError(
                f"another process is writing {target}: wait for it, or choose another name."
            ) from None
        # A file system without locks: the user has to keep processes apart.
