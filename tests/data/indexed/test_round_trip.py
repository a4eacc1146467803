"""What is written is what Megatron writes, and comes back as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rapidformer.data.indexed import IndexedWriter, choose_dtype, merge_indexed, open_indexed

from .rig import (
    CODES,
    GOLDEN,
    GOLDEN_BIN,
    GOLDEN_IDX,
    Documents,
    draw_documents,
    encode,
    read,
    save,
    write,
)


def test_golden_bytes_are_written(tmp_path: Path) -> None:
    prefix = write(tmp_path / "golden", GOLDEN, choose_dtype(30522))
    assert read(prefix) == (GOLDEN_BIN, GOLDEN_IDX)
    assert encode(GOLDEN, np.uint16) == (GOLDEN_BIN, GOLDEN_IDX)


def test_golden_bytes_are_read(tmp_path: Path) -> None:
    dataset = open_indexed(save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX))
    assert [sequence.tolist() for sequence in dataset] == [s for d in GOLDEN for s in d]
    assert dataset.sizes.tolist() == [3, 2, 1, 4] and dataset.sizes.dtype == np.int32
    assert dataset.doc_idx.tolist() == [0, 2, 3, 4] and dataset.doc_idx.dtype == np.int64
    assert dataset.pointers.tolist() == [0, 6, 10, 12]
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 3, 10)
    assert dataset.dtype == np.uint16 and dataset.format == "mmap" and dataset.modes is None


def test_ten_thousand_random_documents_come_back(tmp_path: Path) -> None:
    documents = draw_documents(1, 10_000, 50_000)
    prefix = write(tmp_path / "many", documents)
    assert read(prefix) == encode(documents, np.uint16)
    dataset = open_indexed(prefix)
    dataset.check()
    assert dataset.num_documents == 10_000
    for number, document in enumerate(documents):
        first, last = dataset.doc_idx[number : number + 2]
        assert [sequence.tolist() for sequence in dataset[first:last]] == document


@pytest.mark.parametrize("name", CODES)
def test_every_dtype_comes_back(tmp_path: Path, name: str) -> None:
    documents = draw_documents(2, 40, 120)
    prefix = write(tmp_path / name, documents, name)
    assert read(prefix) == encode(documents, name)
    dataset = open_indexed(prefix)
    assert dataset.dtype.name == name
    assert [s.tolist() for s in dataset] == [s for document in documents for s in document]


_documents = st.lists(
    st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=4), max_size=6
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(documents=_documents, cut=st.integers(0, 6))
def test_any_documents_however_they_are_added(
    tmp_path: Path, documents: Documents, cut: int
) -> None:
    """Item by item, document by document, in one batch, or merged from two: the same bytes."""
    expected = encode(documents, np.int32)
    assert read(write(tmp_path / "items", documents, np.int32)) == expected
    with IndexedWriter(tmp_path / "documents", np.int32, fsync=False) as writer:
        for document in documents:
            writer.add_document([t for s in document for t in s], [len(s) for s in document])
    assert read(tmp_path / "documents") == expected
    with IndexedWriter(tmp_path / "batch", np.int32, fsync=False) as writer:
        flat = np.array([t for d in documents for s in d for t in s], np.int64)
        sizes = np.array([len(s) for d in documents for s in d], np.int64)
        writer.add_batch(flat, sizes, np.array([len(d) for d in documents], np.int64))
        assert writer.num_documents == len(documents)
        assert (writer.num_sequences, writer.num_tokens) == (sizes.size, flat.size)
    assert read(tmp_path / "batch") == expected
    parts = [documents[:cut], documents[cut:]]
    names = [write(tmp_path / f"part{n}", part, np.int32) for n, part in enumerate(parts)]
    merge_indexed(names, tmp_path / "merged")
    assert read(tmp_path / "merged") == expected
    assert [s.tolist() for s in open_indexed(tmp_path / "merged")] == [
        s for d in documents for s in d
    ]


def test_dtype_follows_the_vocabulary_by_megatrons_rule() -> None:
    assert [choose_dtype(size).name for size in (30522, 65499, 65500, None)] == [
        "uint16", "uint16", "int32", "int32",
    ]  # fmt: skip


def test_mode_bytes_of_multimodal_files_are_tolerated_and_merged(tmp_path: Path) -> None:
    prefix = save(tmp_path / "modes", GOLDEN_BIN, GOLDEN_IDX + bytes([0, 1, 0, 1]))
    dataset = open_indexed(prefix)
    assert dataset.modes is not None and dataset.modes.tolist() == [0, 1, 0, 1]
    assert dataset[3].tolist() == [7, 8, 9, 10]
    merge_indexed([prefix, prefix], tmp_path / "both")
    data, index = encode(GOLDEN + GOLDEN, np.uint16)
    assert read(tmp_path / "both") == (data, index + bytes([0, 1, 0, 1] * 2))
