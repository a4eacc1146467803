"""Tensors on disk: read back exactly, and their index cannot run code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import load as torch_load

from rapidformer.checkpoint.index import Part
from rapidformer.checkpoint.pieces import finish_tensors, plan_pieces, write_pieces
from rapidformer.checkpoint.publish import hash_file
from rapidformer.checkpoint.tensors import StoredTensors, find_shared
from rapidformer.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir()
    index, _ = write_pieces(plan_pieces(tensors), folder / "__0_0.distcp")
    finish_tensors([index], folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensors") / "state"
    save_tensors({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)}, folder)
    return folder


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool],
)
def test_dtypes_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"x": torch.arange(5).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    save_tensors(tensors, tmp_path / "s")
    found = {name: torch.zeros_like(value) for name, value in tensors.items()}
    StoredTensors(tmp_path / "s").fill(found.items())
    for name, value in tensors.items():
        assert found[name].dtype is dtype
        assert torch.equal(found[name], value)


def test_shapes(saved: Path) -> None:
    kinds = StoredTensors(saved).kinds
    assert kinds == {"a": ((2, 3), torch.float32), "b": ((), torch.int64)}


def test_missing_tensor_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        StoredTensors(saved).fill([("nowhere", torch.zeros(1))])


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json"):
        StoredTensors(tmp_path / "none")


def test_torch_reads_the_folder(saved: Path) -> None:
    """Its own tools do, and older versions of this library."""
    found = {"a": torch.zeros(2, 3), "b": torch.tensor(0)}
    torch_load(found, checkpoint_id=saved, no_dist=True)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3)) and found["b"] == 3


def test_a_file_is_hashed_while_it_is_written(tmp_path: Path) -> None:
    pieces = plan_pieces({"a": torch.arange(100_000.0), "b": torch.tensor(3)})
    _, digest = write_pieces(pieces, tmp_path / "__0_0.distcp")
    assert digest == hash_file(tmp_path / "__0_0.distcp")


def test_only_the_elements_of_a_view_are_written(tmp_path: Path) -> None:
    save_tensors({"x": torch.arange(100_000.0)[:3]}, tmp_path / "s")
    assert (tmp_path / "s" / "__0_0.distcp").stat().st_size < 10_000


BOX = st.tuples(*[st.integers(0, 4)] * 4)


@given(mine=BOX, theirs=BOX)
def test_two_boxes_have_those_elements_in_common_that_are_in_both(
    mine: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    grid = torch.arange(64).reshape(8, 8)
    ends = (mine[0] + mine[2], mine[1] + mine[3])
    box = grid[mine[0] : ends[0], mine[1] : ends[1]]
    stored = grid[theirs[0] : theirs[0] + theirs[2], theirs[1] : theirs[1] + theirs[3]]
    shared = find_shared(mine[:2], ends, Part(theirs[:2], theirs[2:], "file", 0, 0))
    if shared is None:
        assert not set(box.flatten().tolist()) & set(stored.flatten().tolist())
        return
    inside, there = shared
    assert torch.equal(box[inside], stored[there])
    assert set(box[inside].flatten().tolist()) == (
        set(box.flatten().tolist()) & set(stored.flatten().tolist())
    )


@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_damaged_index_is_never_a_crash(data: st.DataObject, saved: Path) -> None:
    """Any byte changed: the shapes, or a CheckpointError."""
    path, name = saved.parent / "damaged", "index.json"
    path.mkdir(exist_ok=True)
    content = bytearray((saved / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    (path / name).write_bytes(content)
    try:
        shapes = StoredTensors(path).kinds
    except CheckpointError as error:
        assert name in str(error)
    else:
        assert isinstance(shapes, dict)
