from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer.data.indexed import IndexedDataError, IndexedWriter, open_indexed

from .rig import GOLDEN, GOLDEN_BIN, GOLDEN_IDX, encode, read, save, write


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_has_its_final_name_before_the_end(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "deep" / "data", np.uint16) as writer:
        writer.add_document([1, 2, 3], [2, 1])
        assert not [name for name in list_names(tmp_path / "deep") if not name.startswith(".")]
    assert list_names(tmp_path / "deep") == ["data.bin", "data.idx"]
    with pytest.raises(IndexedDataError, match="data is closed"):
        writer.add_item([1])


def test_finalize_without_a_with_block(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "data.idx", "uint16")
    writer.add_document(np.array([5], np.int64), [1])
    writer.finalize()
    assert read(tmp_path / "data") == encode([[[5]]], np.uint16)


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1, 2, 3], [3])
        raise KeyboardInterrupt
    assert list_names(tmp_path) == []


def test_overwriting_replaces_both_files_at_the_end(tmp_path: Path) -> None:
    prefix = save(tmp_path / "data", GOLDEN_BIN, GOLDEN_IDX)
    opened = open_indexed(prefix)
    with pytest.raises(ZeroDivisionError), IndexedWriter(prefix, np.int32) as writer:
        writer.add_document([1], [1])
        raise ZeroDivisionError
    assert read(prefix) == (GOLDEN_BIN, GOLDEN_IDX)
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_document([70000], [1])
        assert read(prefix) == (GOLDEN_BIN, GOLDEN_IDX)
    assert read(prefix) == encode([[[70000]]], np.int32)
    assert opened[3].tolist() == [7, 8, 9, 10]  # what is mapped stays as it was


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_crash_while_publishing_never_pairs_an_index_with_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """After 0, 1 or 2 renames the data can be read whole or is refused, never mixed."""
    prefix = save(tmp_path / "data", GOLDEN_BIN, GOLDEN_IDX)
    original, done = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if len(done) == step:
            raise KeyboardInterrupt
        done.append(target)
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    try:
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document(range(10, 20), [3, 2, 1, 4])  # an index of the same sizes
    except KeyboardInterrupt:
        with pytest.raises(IndexedDataError, match=r"data.idx is missing"):
            open_indexed(prefix)
    else:
        assert open_indexed(prefix)[2].tolist() == [15]
    assert not [name for name in list_names(tmp_path) if name.startswith(".")]


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from rapidformer.data.indexed import IndexedWriter\n"
        "writer = IndexedWriter(sys.argv[1], 'uint16')\n"
        "writer.add_document([9] * 2_000_000, [2_000_000])\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    prefix = tmp_path / "data"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(prefix)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        assert child.stdout.readline() == b"written\n"
        with pytest.raises(IndexedDataError, match=r"another process is writing .*data.bin"):
            IndexedWriter(prefix, np.uint16)
    finally:
        child.kill()
        child.communicate()
    assert list_names(tmp_path) == [".data.bin.part"]
    assert read(write(prefix, GOLDEN)) == (GOLDEN_BIN, GOLDEN_IDX)
    assert list_names(tmp_path) == ["data.bin", "data.idx"]


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    first = IndexedWriter(tmp_path / "data", np.uint16)
    first.add_document([1, 2, 3], [3])
    with pytest.raises(IndexedDataError, match=r"data.bin is being written by this process alrea"):
        IndexedWriter(f"{tmp_path}/./data.idx", np.uint16)
    first.finalize()
    assert read(tmp_path / "data") == encode([[[1, 2, 3]]], np.uint16)
    second = IndexedWriter(tmp_path / "data", np.uint16)
    second.discard()
    assert read(write(tmp_path / "data", GOLDEN)) == (GOLDEN_BIN, GOLDEN_IDX)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, tokens, message",
    [
        ("uint16", [1, 65536], r"token id 65536 does not fit uint16 \(0 to 65535\)"),
        ("uint16", [-1], "token id -1 does not fit uint16"),
        ("int32", np.array([2**31], np.int64), "token id 2147483648 does not fit int32"),
        ("uint8", np.array([256], np.uint16), "token id 256 does not fit uint8"),
        ("float32", [2**24 + 1], "token id 16777217 does not fit float32"),
        ("int32", [2**63], "token id 9223372036854775808 does not fit int32"),
        ("int32", [1.5], "tokens are float64: ids are whole numbers"),
        ("int32", ["a"], "tokens are <U1: ids are whole numbers"),
        ("float32", ["1"], "tokens are <U1: ids are whole numbers"),
        ("int32", [[1, 2], [3, 4]], r"tokens have the shape \(2, 2\)"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_not_wrapped(
    tmp_path: Path, dtype: str, tokens: Any, message: str
) -> None:
    with IndexedWriter(tmp_path / "data", dtype) as writer:
        writer.add_document([1], [1])
        for add in (writer.add_item, lambda flat: writer.add_document(flat, [len(flat)])):
            with pytest.raises(IndexedDataError, match=message):
                add(tokens)
    assert read(tmp_path / "data") == encode([[[1]]], dtype)  # nothing of them was written


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_the_largest_ids_fit(tmp_path: Path, dtype: str) -> None:
    limits = np.iinfo(dtype)
    prefix = write(tmp_path / "data", [[[limits.min, limits.max]]], dtype)
    assert open_indexed(prefix)[0].tolist() == [limits.min, limits.max]


@pytest.mark.parametrize(
    "tokens, sizes, counts, message",
    [
        ([1, 2, 3], [2], [1], "3 tokens were given, but the sizes add to 2"),
        ([1, 2, 3], [2, 1], [1], "2 sizes were given, but sequences_per_document adds to 1"),
        ([1, 2, 3], [4, -1], [2], "sizes hold -1"),
        ([1, 2, 3], [2, 1], [3, -1], "sequences_per_document hold -1"),
        ([1, 2, 3], [1.5, 1.5], [2], "sizes are float64"),
        ([1, 2, 3], 3, [1], r"sizes are int64 of shape \(\)"),
    ],
)
def test_batches_that_do_not_add_up_are_refused(
    tmp_path: Path, tokens: Any, sizes: Any, counts: Any, message: str
) -> None:
    writer = IndexedWriter(tmp_path / "data", np.uint16)
    with pytest.raises(IndexedDataError, match=message):
        writer.add_batch(tokens, sizes, counts)
    writer.finalize()
    assert read(tmp_path / "data") == encode([], np.uint16)


def test_overlong_sequences_are_refused(tmp_path: Path) -> None:
    endless = np.broadcast_to(np.uint8(0), 2**31)  # takes no memory
    with IndexedWriter(tmp_path / "data", np.uint8) as writer:
        message = "a sequence of 2147483648 tokens is too long .* up to 2147483647: split"
        with pytest.raises(IndexedDataError, match=message):
            writer.add_item(endless)
        with pytest.raises(IndexedDataError, match=message):
            writer.add_document(endless, [2**31])


def test_an_unfinished_document_is_refused(tmp_path: Path) -> None:
    unfinished = pytest.raises(IndexedDataError, match="the last 1 of 2 sequences belong to no")
    with unfinished, IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1], [1])
        writer.add_item([1])
        with pytest.raises(IndexedDataError, match="end the current document"):
            writer.add_document([2], [1])
    assert list_names(tmp_path) == []


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "complex64", "bool"])
def test_other_types_are_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(IndexedDataError, match=f"stored as {dtype}: use one of uint8, int8"):
        IndexedWriter(tmp_path / "data", dtype)
    assert list_names(tmp_path) == []


@pytest.mark.parametrize("prefix", ["", "folder/", ".bin"])
def test_a_prefix_without_a_name_is_refused(prefix: str) -> None:
    with pytest.raises(IndexedDataError, match="names no files to write"):
        IndexedWriter(prefix, np.uint16)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexedDataError, match=r"file/data.bin cannot be written: "):
        IndexedWriter(tmp_path / "file" / "data", np.uint16)


# --- a full disk ---------------------------------------------------------------------------------


def test_a_full_disk_is_reported_and_leaves_no_half_file(tmp_path: Path) -> None:
    """A limit on the size of files, in a process of its own, stands for the end of the disk."""
    code = (
        "import resource, sys\n"
        "from rapidformer.data.indexed import IndexedWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))\n"
        "with IndexedWriter(sys.argv[1], 'int32') as writer:\n"
        "    for _ in range(100):\n"
        "        writer.add_document([1] * 10_000, [10_000])\n"
    )
    prefix = save(tmp_path / "data", GOLDEN_BIN, GOLDEN_IDX)
    done = subprocess.run(
        [sys.executable, "-c", code, prefix], capture_output=True, text=True, timeout=60
    )
    assert "data.bin cannot be written: the file may not grow further. The " in done.stderr
    assert "sequences before this point need" in done.stderr
    assert list_names(tmp_path) == ["data.bin", "data.idx"]
    assert read(prefix) == (GOLDEN_BIN, GOLDEN_IDX)  # the older pair stays


@pytest.mark.parametrize("stage", ["tokens", "sync", "index"])
def test_no_space_at_any_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*args: Any) -> None:
        raise full

    named = "data.idx" if stage == "index" else "data.bin"
    message = rf"{named} cannot be written: the disk is full. The . sequences before this point"
    refused = pytest.raises(IndexedDataError, match=message)
    with refused as raised, IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1, 2], [1, 1])
        if stage == "tokens":
            file = writer._file
            assert file is not None
            monkeypatch.setattr(writer, "_file", _FullFile(file, full))
            writer.add_document([3], [1])
        elif stage == "sync":
            monkeypatch.setattr(os, "fsync", refuse)
        else:
            monkeypatch.setattr(writer, "_write_index", refuse)
    assert raised.value.__cause__ is full
    assert list_names(tmp_path) == []


class _FullFile:
    """A file that can take no more, not even when it is closed."""

    def __init__(self, file: Any, error: OSError) -> None:
        self._file = file
        self._error = error

    def write(self, data: Any) -> int:
        raise self._error

    def close(self) -> None:
        self._file.close()
        raise self._error
