"""Damaged or mismatched files are refused with every reason there is."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from rapidformer.data.indexed import IndexedDataError, index, open_indexed
from rapidformer.errors import DataError

from .rig import (
    CODE_AT,
    COUNT_AT,
    GOLDEN,
    GOLDEN_BIN,
    GOLDEN_IDX,
    MARKS_AT,
    MARKS_COUNT_AT,
    POINTERS_AT,
    SIZES_AT,
    VERSION_AT,
    encode,
    save,
)


def put(index: bytes, at: int, value: bytes) -> bytes:
    return index[:at] + value + index[at + len(value) :]


def long(value: int) -> bytes:
    return struct.pack("<q", value)


def size(value: int) -> bytes:
    return struct.pack("<i", value)


DAMAGE = {
    "empty": (b"", "golden.idx is empty"),
    "magic": (put(GOLDEN_IDX, 0, b"GARBAGE!!"), r"starts with b'GARBAGE!!', which is neither"),
    "header": (GOLDEN_IDX[:30], "golden.idx has 30 bytes, its header alone has 34"),
    "version": (put(GOLDEN_IDX, VERSION_AT, long(2)), "of version 2; version 1 can be read"),
    "dtype": (put(GOLDEN_IDX, CODE_AT, b"\x09"), "token dtype 9; known are 1 uint8, .*, 8 uint16"),
    "sequences": (
        put(GOLDEN_IDX, COUNT_AT, long(5)),
        "has 114 bytes, but its 5 sequences and 4 document marks take 126",
    ),
    "absurd": (put(GOLDEN_IDX, COUNT_AT, b"\xff" * 8), "its 18446744073709551615 sequences"),
    "marks": (put(GOLDEN_IDX, MARKS_COUNT_AT, long(3)), "4 sequences and 3 document marks"),
    "no marks": (
        put(GOLDEN_IDX, MARKS_COUNT_AT, long(0))[:MARKS_AT],
        "it has no document marks",
    ),
    "cut": (GOLDEN_IDX[:-8], "has 106 bytes, but its 4 sequences and 4 document marks take 114"),
    "trailing": (GOLDEN_IDX + b"\x00", "has 115 bytes"),
    "other type": (
        put(GOLDEN_IDX, CODE_AT, b"\x04"),
        r"the .bin has 20 bytes, but the last sequence ends at byte 28 \(int32\)",
    ),
    "negative size": (put(GOLDEN_IDX, SIZES_AT + 4, size(-2)), "sequence 1 has -2 tokens"),
    "negative last": (put(GOLDEN_IDX, SIZES_AT + 12, size(-4)), "sequence 3 has -4 tokens"),
    "size": (
        put(GOLDEN_IDX, SIZES_AT, size(4)),
        "sequence 1 points to byte 6, but the sequences before it end at byte 8",
    ),
    "first pointer": (
        put(GOLDEN_IDX, POINTERS_AT, long(2)),
        "sequence 0 points to byte 2, but the sequences before it end at byte 0",
    ),
    "pointer": (put(GOLDEN_IDX, POINTERS_AT + 8, long(1 << 40)), "sequence 1 points to byte 1099"),
    "negative pointer": (put(GOLDEN_IDX, POINTERS_AT + 16, long(-6)), "sequence 2 points to byte"),
    "odd pointer": (put(GOLDEN_IDX, POINTERS_AT + 24, long(11)), "sequence 3 points to byte 11"),
    "first mark": (put(GOLDEN_IDX, MARKS_AT, long(1)), "marks start with 1 instead of 0"),
    "last mark": (
        put(GOLDEN_IDX, MARKS_AT + 24, long(3)),
        "marks end with 3, but there are 4 sequences .*rapidformer data merge",
    ),
    "falling marks": (
        put(GOLDEN_IDX, MARKS_AT + 8, long(4)),
        "marks go down from 4 to 3 at document 1",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    index, message = DAMAGE[name]
    prefix = save(tmp_path / "golden", GOLDEN_BIN, index)
    with pytest.raises(IndexedDataError, match=message) as raised:
        open_indexed(prefix)
    assert str(raised.value).startswith(f"{prefix} cannot be read")
    assert isinstance(raised.value, DataError)


@pytest.mark.parametrize(
    "data, message",
    [
        (GOLDEN_BIN[:-2], "the .bin has 18 bytes, .* ends at byte 20 .*: the .bin was cut short"),
        (GOLDEN_BIN + b"\x00", "the .bin has 21 bytes, .* ends at byte 20 .* gone on growing"),
        (b"", "the .bin has 0 bytes"),
    ],
)
def test_a_bin_of_another_size_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(IndexedDataError, match=message):
        open_indexed(save(tmp_path / "golden", data, GOLDEN_IDX))


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_crash(
    tmp_path: Path, ending: str
) -> None:
    """Reading a mapped file beyond its new end would kill the process (SIGBUS)."""
    prefix = save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX)
    data = open_indexed(prefix)
    expected = data.get(0).copy()
    data._look_again_at = 0.0
    os.truncate(f"{prefix}.{ending}", 4)
    with pytest.raises(IndexedDataError, match=rf"golden.{ending} has shrunk from \d+ to 4 bytes"):
        data.get(0)
    assert len(expected)


def test_a_file_that_is_replaced_or_deleted_stays_readable(tmp_path: Path) -> None:
    prefix = save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX)
    data = open_indexed(prefix)
    Path(f"{prefix}.bin").unlink()
    expected = data.get(0).copy()
    Path(f"{prefix}.bin").write_bytes(b"")
    data._look_again_at = 0.0
    assert np.array_equal(data.get(0), expected)


def test_all_reasons_are_reported_at_once(tmp_path: Path) -> None:
    index = put(put(GOLDEN_IDX, VERSION_AT, long(7)), CODE_AT, b"\x63") + b"\x00\x00"
    with pytest.raises(IndexedDataError, match="3 problems") as raised:
        open_indexed(save(tmp_path / "header", GOLDEN_BIN, index))
    assert len(raised.value.problems) == 3
    index = put(put(GOLDEN_IDX, SIZES_AT + 4, size(-2)), MARKS_AT, long(1))
    with pytest.raises(IndexedDataError, match="4 problems") as raised:
        open_indexed(save(tmp_path / "inside", GOLDEN_BIN[:-2], index))
    text = str(raised.value)
    for part in ("has 18 bytes", "has -2 tokens", "points to byte", "start with 1"):
        assert part in text


class TestLongIndexes:
    """More than a million sequences are looked at only at their ends when they are opened."""

    @pytest.fixture(autouse=True)
    def _make_all_indexes_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(index, "THOROUGH_LIMIT", 0)
        monkeypatch.setattr(index, "_BLOCK", 2)

    @pytest.mark.parametrize("name", ["pointer", "negative pointer", "negative size"])
    def test_a_stray_sequence_is_refused_when_it_is_read(self, tmp_path: Path, name: str) -> None:
        index, message = DAMAGE[name]
        dataset = open_indexed(save(tmp_path / "golden", GOLDEN_BIN, index))
        wrong = 2 if name == "negative pointer" else 1
        assert dataset[0].tolist() == [1, 2, 3]
        with pytest.raises(IndexedDataError, match=f"damaged: sequence {wrong} .*data info"):
            dataset[wrong]
        with pytest.raises(IndexedDataError, match=message):
            dataset.check()

    @pytest.mark.parametrize("name", ["size", "falling marks"])
    def test_check_looks_at_every_entry(self, tmp_path: Path, name: str) -> None:
        index, message = DAMAGE[name]
        dataset = open_indexed(save(tmp_path / "golden", GOLDEN_BIN, index))
        with pytest.raises(IndexedDataError, match=message):
            dataset.check()

    @pytest.mark.parametrize("name", ["first pointer", "negative last", "odd pointer", "last mark"])
    def test_the_ends_are_looked_at_when_opening(self, tmp_path: Path, name: str) -> None:
        index, message = DAMAGE[name]
        data = GOLDEN_BIN[:19] if name == "odd pointer" else GOLDEN_BIN
        with pytest.raises(IndexedDataError, match=message):
            open_indexed(save(tmp_path / "golden", data, index))

    def test_a_whole_index_passes_block_by_block(self, tmp_path: Path) -> None:
        documents = [[[number] * (number % 3)] for number in range(7)]
        open_indexed(save(tmp_path / "whole", *encode(documents, np.uint16))).check()


# --- names ---------------------------------------------------------------------------------------


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    (tmp_path / "half.bin").write_bytes(GOLDEN_BIN)
    with pytest.raises(IndexedDataError, match=r"half.idx is missing, although its .bin is there"):
        open_indexed(tmp_path / "half")
    (tmp_path / "half.bin").rename(tmp_path / "half.idx")
    with pytest.raises(IndexedDataError, match=r"half.bin is missing, although its .idx is there"):
        open_indexed(tmp_path / "half")


def test_a_wrong_prefix_names_near_ones(tmp_path: Path) -> None:
    save(tmp_path / "corpus_text_document", *encode(GOLDEN, np.uint16))
    save(tmp_path / "other", *encode(GOLDEN, np.uint16))
    near = "did you mean .*corpus_text_document"
    for name in ("corpus", "corpus_text_sentence", "corpus_text_document.npy"):
        with pytest.raises(IndexedDataError, match=f"{name}.bin and .* missing: {near}"):
            open_indexed(tmp_path / name)
    with pytest.raises(IndexedDataError, match=rf"{near}, .*other\?"):
        open_indexed(tmp_path)
    with pytest.raises(IndexedDataError, match=r"holds corpus_text_document, other\."):
        open_indexed(tmp_path / "zzz")
    with pytest.raises(IndexedDataError, match=r"there is no folder .*nowhere"):
        open_indexed(tmp_path / "nowhere" / "corpus")
    (tmp_path / "bare").mkdir()
    with pytest.raises(IndexedDataError, match=r"bare holds no .bin/.idx pair"):
        open_indexed(tmp_path / "bare" / "corpus")


def test_a_path_that_cannot_be_reached_is_reported(tmp_path: Path) -> None:
    with pytest.raises(IndexedDataError, match=r"x.idx cannot be reached: File name too long"):
        open_indexed(tmp_path / ("x" * 300))


def test_a_file_that_may_not_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    prefix = save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX)
    monkeypatch.setattr(Path, "open", refuse)
    for warmup in (False, True):
        with pytest.raises(IndexedDataError, match=r"golden.bin cannot be opened: .*ulimit -n"):
            open_indexed(prefix, warmup=warmup)
