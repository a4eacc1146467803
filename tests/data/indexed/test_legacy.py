"""Files of `--dataset-impl lazy` and `cached`; test_reader.py reads them like the others."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from rapidformer.data.indexed import IndexedDataError, merge_indexed, open_indexed

from .rig import GOLDEN, draw_documents, encode, encode_legacy, read, save


def test_random_documents_come_back(tmp_path: Path) -> None:
    documents = draw_documents(3, 300, 100_000)
    dataset = open_indexed(save(tmp_path / "old", *encode_legacy(documents)))
    dataset.check()
    assert dataset.dtype == np.int32 and dataset.sizes.dtype == np.int32
    assert [s.tolist() for s in dataset] == [s for document in documents for s in document]
    assert dataset.doc_idx.tolist() == [0, *np.cumsum([len(d) for d in documents]).tolist()]


@pytest.mark.parametrize(
    "dtype, code, element_bytes",
    [("float64", 6, 4), ("float64", 7, 8), ("float32", 6, 4), ("uint8", 1, 1), ("int64", 5, 8)],
)
def test_the_files_tell_the_size_of_a_float(
    tmp_path: Path, dtype: str, code: int, element_bytes: int
) -> None:
    files = encode_legacy(GOLDEN, dtype, code, element_bytes)
    dataset = open_indexed(save(tmp_path / "old", *files))
    dataset.check()
    assert dataset.dtype.name == dtype
    assert [s.tolist() for s in dataset] == [s for document in GOLDEN for s in document]


def test_doubles_of_2021_in_the_mmap_format(tmp_path: Path) -> None:
    data, index = encode(GOLDEN, "float64")
    prefix = save(tmp_path / "doubles", data, index[:17] + b"\x07" + index[18:])
    assert open_indexed(prefix).dtype == np.float64
    assert open_indexed(prefix)[1].tolist() == [4, 5]


def test_merging_turns_the_old_format_into_the_new(tmp_path: Path) -> None:
    old = save(tmp_path / "old", *encode_legacy(GOLDEN))
    new = save(tmp_path / "new", *encode(GOLDEN, np.int32))
    merge_indexed([old, new], tmp_path / "both")
    assert read(tmp_path / "both") == encode(GOLDEN + GOLDEN, np.int32)


def put(index: bytes, at: int, value: int) -> bytes:
    return index[:at] + struct.pack("<q", value) + index[at + 8 :]


# magic 0, version 8, dtype 16, element size 24, sequences 32, sizes 40, marks 48, arrays 56:
# dim_offsets (5), data_offsets (5) from 96, sizes (4) from 136, doc_idx (4) from 168.
@pytest.mark.parametrize(
    "at, value, message",
    [
        (8, 2, "is of version 2; version 1 can be read"),
        (16, 9, "names the token dtype 9"),
        (24, 3, "says 3 bytes per token, but int32 has 4"),
        (24, 2, "has 40 bytes, but its index describes 20"),
        (32, 3, "has 4 sizes for 3 sequences: tokens of more than one dimension"),
        (48, 5, "has 200 bytes, but its 4 sequences and 5 document marks take 208"),
        (128, 11, "has 40 bytes, but its index describes 44"),
        (104, 4, "sequence 1 points to byte 16, but the sequences before it end at byte 12"),
        (136, -1, "has sequences of -1 to 4 tokens"),
        (176, 9, "the document marks go down from 9 to 3"),
        (192, 3, "the document marks end with 3, but there are 4 sequences"),
    ],
)
def test_damage_is_refused_with_its_reason(
    tmp_path: Path, at: int, value: int, message: str
) -> None:
    data, index = encode_legacy(GOLDEN)
    prefix = save(tmp_path / "old", data, put(index, at, value))
    with pytest.raises(IndexedDataError, match=message):
        open_indexed(prefix)


def test_a_cut_header_is_refused(tmp_path: Path) -> None:
    data, index = encode_legacy(GOLDEN)
    with pytest.raises(IndexedDataError, match=r"old.idx has 20 bytes, its header alone has 56"):
        open_indexed(save(tmp_path / "old", data, index[:20]))
