"""A plain, slow reference of the two formats, written from their layout alone."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.data.indexed import IndexedWriter

Documents = list[list[list[int]]]
CODES = {
    "uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7,
    "uint16": 8,
}  # fmt: skip
GOLDEN: Documents = [[[1, 2, 3], [4, 5]], [[6]], [[7, 8, 9, 10]]]
GOLDEN_BIN = bytes.fromhex("0100020003000400050006000700080009000a00")
GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0400000000000000 0400000000000000"
    "03000000020000000100000004000000"
    "0000000000000000 0600000000000000 0a00000000000000 0c00000000000000"
    "0000000000000000 0200000000000000 0300000000000000 0400000000000000"
)
# Where the golden index holds its parts.
VERSION_AT, CODE_AT, COUNT_AT, MARKS_COUNT_AT, SIZES_AT, POINTERS_AT, MARKS_AT = (
    9, 17, 18, 26, 34, 50, 82,
)  # fmt: skip


def encode(documents: Documents, dtype: Any) -> tuple[bytes, bytes]:
    """The bytes of the .bin and of the .idx (mmap), one struct after the other."""
    kind = np.dtype(dtype)
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(np.array(sequence, kind).tobytes() for sequence in sequences)
    sizes, pointers, marks = b"", b"", struct.pack("<q", 0)
    pointer = done = 0
    for sequence in sequences:
        sizes += struct.pack("<i", len(sequence))
        pointers += struct.pack("<q", pointer)
        pointer += len(sequence) * kind.itemsize
    for document in documents:
        done += len(document)
        marks += struct.pack("<q", done)
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[kind.name])
    header += struct.pack("<QQ", len(sequences), len(documents) + 1)
    return data, header + sizes + pointers + marks


def encode_legacy(
    documents: Documents, dtype: Any = np.int32, code: int = 4, element_bytes: int = 4
) -> tuple[bytes, bytes]:
    """The bytes of the .bin and of the .idx as `--dataset-impl lazy` and `cached` write them."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    sizes = [len(sequence) for sequence in sequences]
    step = np.dtype(dtype).itemsize // element_bytes
    marks = [0, *np.cumsum([len(document) for document in documents])]
    header = b"TNTIDX\x00\x00" + struct.pack("<QQQ", 1, code, element_bytes)
    header += struct.pack("<QQQ", len(sizes), len(sizes), len(marks))
    arrays = [range(len(sizes) + 1), np.cumsum([0, *sizes]) * step, sizes, marks]
    return data, header + b"".join(np.array(list(a), np.int64).tobytes() for a in arrays)


def save(prefix: Path, data: bytes, index: bytes) -> str:
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix)


def read(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write(prefix: Path, documents: Documents, dtype: Any = np.uint16) -> str:
    """Write through the library, sequence by sequence."""
    with IndexedWriter(prefix, dtype, fsync=False) as writer:
        for document in documents:
            for sequence in document:
                writer.add_item(sequence)
            writer.end_document()
    return str(prefix)


def draw_documents(seed: int, count: int, highest: int) -> Documents:
    """Documents of 0 to 4 sequences of 0 to 30 tokens."""
    generator = np.random.default_rng(seed)
    return [
        [
            generator.integers(0, highest, generator.integers(0, 31)).tolist()
            for _ in range(generator.integers(0, 5))
        ]
        for _ in range(count)
    ]
