from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rapidformer.data.indexed import IndexedDataError, merge_indexed, writer

from .rig import GOLDEN, GOLDEN_BIN, GOLDEN_IDX, draw_documents, encode, read, save, write


def test_merging_equals_writing_everything_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BLOCK", 64)  # several blocks of each array
    parts = [draw_documents(seed, count, 60_000) for seed, count in ((1, 200), (2, 0), (3, 77))]
    names = [write(tmp_path / f"part{number}", part) for number, part in enumerate(parts)]
    merge_indexed(names, tmp_path / "merged")
    assert read(tmp_path / "merged") == encode([d for part in parts for d in part], np.uint16)


def test_a_pair_may_be_merged_with_itself_and_named_by_its_file(tmp_path: Path) -> None:
    prefix = write(tmp_path / "part", GOLDEN)
    merge_indexed([prefix, f"{prefix}.bin"], f"{tmp_path}/twice.idx")
    assert read(tmp_path / "twice") == encode(GOLDEN + GOLDEN, np.uint16)


def test_differing_types_are_refused_by_name(tmp_path: Path) -> None:
    names = [
        write(tmp_path / f"part{number}", GOLDEN, dtype)
        for number, dtype in enumerate(["uint16", "int32", "uint16"])
    ]
    message = "different dtypes cannot be merged: uint16: .*part0, .*part2; int32: .*part1"
    with pytest.raises(IndexedDataError, match=message):
        merge_indexed(names, tmp_path / "merged")
    assert not (tmp_path / "merged.bin").exists()


def test_modes_of_some_only_are_refused(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", GOLDEN)
    modes = save(tmp_path / "modes", GOLDEN_BIN, GOLDEN_IDX + b"\x00\x01\x00\x01")
    message = "different multimodal mode bytes .*: without: .*plain; with: .*modes"
    with pytest.raises(IndexedDataError, match=message):
        merge_indexed([plain, modes], tmp_path / "merged")
    merge_indexed([write(tmp_path / "empty", []), modes], tmp_path / "merged")
    assert read(tmp_path / "merged") == read(modes)


def test_every_damaged_part_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good", GOLDEN)
    short = save(tmp_path / "short", GOLDEN_BIN[:-2], GOLDEN_IDX)
    with pytest.raises(IndexedDataError, match="2 problems") as raised:
        merge_indexed([good, short, tmp_path / "gone"], tmp_path / "merged")
    assert "short cannot be read" in str(raised.value) and "gone.bin and" in str(raised.value)


def test_the_output_may_not_be_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "part", GOLDEN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IndexedDataError, match="part is one of the inputs"):
        merge_indexed([prefix], "part")
    assert read(prefix) == (GOLDEN_BIN, GOLDEN_IDX)


def test_nothing_to_merge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexedDataError, match="nothing to merge"):
        merge_indexed([], tmp_path / "merged")


def test_too_little_room_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write(tmp_path / "part", GOLDEN)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200))
    with pytest.raises(IndexedDataError, match=r"merged needs 268 bytes, but .* has 200 free"):
        merge_indexed([prefix, prefix], tmp_path / "new" / "merged")
    assert not (tmp_path / "new").exists()
