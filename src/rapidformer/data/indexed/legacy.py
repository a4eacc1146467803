"""The index of Megatron's older format, written with ``--dataset-impl lazy`` or ``cached``.

Its offsets count elements of ``element_size`` bytes, not bytes, and the size of a float follows
from the files rather than the dtype code. Only the index differs: the ``.bin`` holds the same
tokens, so the same code maps and reads both.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

from rapidformer.data.indexed.layout import (
    DTYPES,
    LEGACY_MAGIC,
    MAX_SEQUENCE,
    OFFSET_DTYPE,
    SIZE_DTYPE,
    VERSION,
    Index,
    IndexedDataError,
    get_index_path,
)

HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, dtype, element size, N, sizes, marks


def load_legacy_index(prefix: str, mapped: mmap.mmap | bytes, data_bytes: int) -> Index:
    """Read the header and create views of the offsets and boundaries; the sizes become int32."""
    name = get_index_path(prefix).name
    assert mapped[: len(LEGACY_MAGIC)] == LEGACY_MAGIC
    if len(mapped) < HEADER.size:
        raise IndexedDataError(
            f"{name} has {len(mapped)} bytes, its header alone has {HEADER.size}.", prefix
        )
    _, version, code, _, num_sequences, num_sizes, num_marks = HEADER.unpack_from(mapped)
    problems = []
    if version != VERSION:
        problems.append(f"{name} is of version {version}; version {VERSION} can be read.")
    if code not in DTYPES:
        problems.append(f"{name} names the token dtype {code}, which is unknown.")
    if num_sizes != num_sequences:
        problems.append(
            f"{name} has {num_sizes} sizes for {num_sequences} sequences: tokens of more than one "
            "dimension cannot be read."
        )
    whole = HEADER.size + 8 * (2 * (num_sequences + 1) + num_sizes + num_marks)
    if len(mapped) != whole:
        problems.append(
            f"{name} has {len(mapped)} bytes, but its {num_sequences} sequences and "
            f"{num_marks} document marks take {whole}."
        )
    if problems:
        raise IndexedDataError(problems, prefix)
    return _lay_views(prefix, mapped, data_bytes)


def _lay_views(prefix: str, mapped: mmap.mmap | bytes, data_bytes: int) -> Index:
    name = get_index_path(prefix).name
    _, _, code, element_bytes, count, _, num_marks = HEADER.unpack_from(mapped)
    offsets_at = HEADER.size + 8 * (count + 1)
    offsets = np.frombuffer(mapped, OFFSET_DTYPE, count + 1, offsets_at)
    sizes = np.frombuffer(mapped, OFFSET_DTYPE, count, offsets_at + 8 * (count + 1))
    doc_idx = np.frombuffer(mapped, OFFSET_DTYPE, num_marks, offsets_at + 8 * (2 * count + 1))
    if count and not 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_SEQUENCE:
        raise IndexedDataError(
            f"{name} has sequences of {sizes.min()} to {sizes.max()} tokens.", prefix
        )
    dtype = DTYPES[code]
    total = int(sizes.sum(dtype=np.int64))
    if dtype.kind == "f" and total and data_bytes in (4 * total, 8 * total):
        # Writers of the time gave doubles an element size of 4, or floats the code of doubles.
        dtype = np.dtype(f"<f{data_bytes // total}")
    if element_bytes not in (1, 2, 4, 8) or dtype.itemsize % element_bytes:
        problem = f"says {element_bytes} bytes per token, but {dtype.name} has {dtype.itemsize}."
        raise IndexedDataError(f"{name} {problem}", prefix)
    if int(offsets[-1]) * element_bytes != data_bytes:
        raise IndexedDataError(
            f"{Path(name).stem}.bin has {data_bytes} bytes, but its index describes "
            f"{int(offsets[-1]) * element_bytes}.",
            prefix,
        )
    narrow = sizes.astype(SIZE_DTYPE)
    return Index("cached", dtype, narrow, offsets[:-1], int(element_bytes), doc_idx)
