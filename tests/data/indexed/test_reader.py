from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest

from rapidformer.data.indexed import IndexedDataError, has_indexed, open_indexed

from .rig import GOLDEN, GOLDEN_BIN, GOLDEN_IDX, encode_legacy, save, write


@pytest.fixture(params=["mmap", "cached"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same documents in both formats, which read alike."""
    if request.param == "mmap":
        return save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX)
    return save(tmp_path / "golden", *encode_legacy(GOLDEN))


def test_parts_of_a_sequence(prefix: str) -> None:
    dataset = open_indexed(prefix)
    assert dataset.get(3).tolist() == [7, 8, 9, 10]
    assert dataset.get(3, 1).tolist() == [8, 9, 10]
    assert dataset.get(3, 1, 2).tolist() == [8, 9]
    assert dataset.get(np.int64(1), offset=2).tolist() == []
    assert dataset[-1].tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("offset, length", [(0, 5), (3, 2), (-1, 1), (5, None), (0, -1)])
def test_more_than_a_sequence_holds_is_refused(
    prefix: str, offset: int, length: int | None
) -> None:
    with pytest.raises(IndexError, match=r"asked of sequence 3 of .*golden, which has 4"):
        open_indexed(prefix).get(3, offset, length)


@pytest.mark.parametrize("index", [4, -5])
def test_sequences_that_are_not_there(prefix: str, index: int) -> None:
    with pytest.raises(IndexError):
        open_indexed(prefix)[index]


def test_slices_are_contiguous(prefix: str) -> None:
    dataset = open_indexed(prefix)
    assert [s.tolist() for s in dataset[1:3]] == [[4, 5], [6]]
    assert [s.tolist() for s in dataset[2:]] == [[6], [7, 8, 9, 10]]
    assert len(dataset[:]) == 4 and dataset[3:1] == []
    with pytest.raises(IndexError, match="contiguous"):
        dataset[::2]


def test_tokens_across_sequences(prefix: str) -> None:
    dataset = open_indexed(prefix)
    assert dataset.read_tokens(2, 5).tolist() == [3, 4, 5, 6, 7]
    assert dataset.read_tokens(10, 0).tolist() == []
    for start, length in ((8, 3), (-1, 1), (0, -1)):
        with pytest.raises(IndexError, match="which has 10"):
            dataset.read_tokens(start, length)


def test_nothing_is_copied_and_nothing_can_be_changed(tmp_path: Path) -> None:
    dataset = open_indexed(save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX))
    assert np.shares_memory(dataset.get(1), dataset.read_tokens(3, 2))
    for array in (dataset.sizes, dataset.doc_idx, dataset.pointers, dataset[0]):
        assert not array.flags.owndata and not array.flags.writeable


def test_an_array_outlives_its_dataset_and_nothing_holds_the_dataset(prefix: str) -> None:
    dataset = open_indexed(prefix)
    tokens = dataset[3]
    watch = weakref.ref(dataset)
    gc.disable()
    try:
        del dataset
        assert watch() is None
    finally:
        gc.enable()
    assert tokens.tolist() == [7, 8, 9, 10]


def test_pickled_it_reopens_its_files_from_any_folder(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = open_indexed("golden")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 500
    again = pickle.loads(pickled)
    assert again.prefix == "golden" and again[3].tolist() == [7, 8, 9, 10]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickled)[3].tolist() == [7, 8, 9, 10]


def test_an_ending_in_the_prefix_is_understood(prefix: str) -> None:
    for name in (prefix, Path(prefix), f"{prefix}.bin", f"{prefix}.idx"):
        assert has_indexed(name)
        assert open_indexed(name).prefix == prefix
    assert not has_indexed(f"{prefix}.txt")


def test_a_prefix_may_itself_end_in_bin(tmp_path: Path) -> None:
    prefix = save(tmp_path / "odd.bin", GOLDEN_BIN, GOLDEN_IDX)
    assert open_indexed(prefix).prefix == prefix


def test_warm_up_reads_both_files(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer.data.indexed import reader

    read: list[str] = []
    original = reader._read_through
    monkeypatch.setattr(reader, "_BLOCK", 7)
    monkeypatch.setattr(
        reader, "_read_through", lambda path: (read.append(path.name), original(path))
    )
    assert len(open_indexed(prefix, warmup=True)) == 4
    assert read == ["golden.idx", "golden.bin"]


def test_the_implementation_must_be_that_of_the_files(tmp_path: Path) -> None:
    new = save(tmp_path / "new", GOLDEN_BIN, GOLDEN_IDX)
    old = save(tmp_path / "old", *encode_legacy(GOLDEN))
    assert open_indexed(new, "mmap").format == "mmap"
    assert open_indexed(old, "lazy").format == open_indexed(old, "cached").format == "cached"
    with pytest.raises(IndexedDataError, match="of the mmap format, but --data-impl is lazy"):
        open_indexed(new, "lazy")
    with pytest.raises(IndexedDataError, match="of the cached format, but --data-impl is mmap"):
        open_indexed(old, "mmap")
    with pytest.raises(IndexedDataError, match="--data-impl raw is unknown: use one of infer"):
        open_indexed(new, "raw")


def test_empty_data_opens(tmp_path: Path) -> None:
    dataset = open_indexed(write(tmp_path / "empty", []))
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)
    dataset.check()
    assert dataset[:] == [] and pickle.loads(pickle.dumps(dataset)).num_tokens == 0
    hollow = open_indexed(write(tmp_path / "hollow", [[], [[]], []]))
    assert (len(hollow), hollow.num_documents, hollow[0].tolist()) == (1, 3, [])


def test_many_files_need_no_descriptors_beyond_their_maps(prefix: str) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    datasets = [open_indexed(prefix) for _ in range(5)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2 * len(datasets)
