"""Tensors on disk: read back exactly, and their index cannot run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import load as torch_load
from torch.distributed.checkpoint import save as torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from rapidformer.checkpoint.pieces import finish_tensors, plan_pieces, write_pieces
from rapidformer.checkpoint.publish import hash_file
from rapidformer.checkpoint.tensors import load_tensors, read_shapes
from rapidformer.dist.topology import Topology
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
    load_tensors(found, tmp_path / "s", Topology())
    for name, value in tensors.items():
        assert found[name].dtype is dtype
        assert torch.equal(found[name], value)


def test_shapes(saved: Path) -> None:
    assert read_shapes(saved) == {"a": (2, 3), "b": ()}


def test_missing_tensor_is_named(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_tensors({"nowhere": torch.zeros(1)}, saved, Topology())


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: no such file"):
        read_shapes(tmp_path / "none")


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


# ---- indexes from before index.json: torch's, which are pickles -----------------------------


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As torch itself writes a folder."""
    folder = tmp_path_factory.mktemp("old") / "state"
    torch_save(
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3)},
        checkpoint_id=folder,
        no_dist=True,
    )
    return folder


def test_an_old_folder_is_read(old: Path) -> None:
    assert read_shapes(old) == {"a": (2, 3), "b": ()}
    found = {"a": torch.zeros(2, 3), "b": torch.tensor(0)}
    load_tensors(found, old, Topology())
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3)) and found["b"] == 3


class Command:
    """Pickles into a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


def make_call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls ``module.name(argument)``; the name may have dots (protocol 4)."""

    def short(text: str) -> bytes:
        return b"\x8c" + bytes([len(text.encode())]) + text.encode()

    return b"\x80\x04" + short(module) + short(name) + b"\x93" + short(argument) + b"\x85R."


@pytest.mark.parametrize(
    "function", [os.mkdir, eval, getattr, torch.load], ids=lambda f: f.__name__
)
def test_index_cannot_call_functions(function: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    argument = f"__import__('os').mkdir({str(mark)!r})" if function is eval else str(mark)
    arguments = (argument, "x") if function is getattr else (argument,)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Command(function, *arguments)))
    with pytest.raises(CheckpointError, match=r"cannot be read: it has .* in place of"):
        read_shapes(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        # torch's own checkpoint modules import `os` and others: dotted names reach through them.
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "Path.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.tensor._api", "torch.load"),
        ("torch.distributed.checkpoint.format_utils", "torch.load"),
        ("torch.distributed.checkpoint.format_utils", "dcp_to_torch_save"),
    ],
)
def test_index_cannot_reach_code_through_allowed_modules(
    module: str, name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / ".metadata").write_bytes(make_call(module, name, str(mark)))
    with pytest.raises(CheckpointError, match=r"cannot be read: it has .* in place of"):
        read_shapes(tmp_path)
    assert not mark.exists()


def test_index_cannot_set_attributes(tmp_path: Path) -> None:
    """A pickle may give any object a state, a class too: that would change it for everybody."""
    forged = (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0dMetadataIndex\x93"
        b"N}\x8c\x06forged\x88s\x86b."
    )
    pickle.loads(forged)
    assert MetadataIndex.forged  # type: ignore[attr-defined]
    del MetadataIndex.forged  # type: ignore[attr-defined]
    (tmp_path / ".metadata").write_bytes(forged)
    with pytest.raises(CheckpointError, match="not an object is given a state"):
        read_shapes(tmp_path)
    assert not hasattr(MetadataIndex, "forged")


def nest(depth: int) -> bytes:
    """A dictionary whose key is a tuple of tuples of tuples …: hashing it would take forever."""
    doubled = b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(depth))
    return b"\x80\x04)\x94" + doubled + b"}h%cNs." % depth


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}), "it has dict in place of .*Metadata"),
        (pickle.dumps(Metadata({}, storage_data=None)), "a list of tensors is malformed"),
        (pickle.dumps(Metadata({"a": 3})), "malformed"),  # type: ignore[dict-item]
        (b"\x80\x04r\xff\xff\xff\x7f.", "cannot be read"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "NoneType in place of"),
        (b"cos\nsystem\n.", "the opcode GLOBAL, which no checkpoint needs"),
        (b"\x80\x04\x82\x01.", "the opcode EXT1, which no checkpoint needs"),
        (b"\x80\x04U\x01aQ.", "which no checkpoint needs"),
        (nest(60), "a key is neither a name nor an object"),
        (b"", "cannot be read"),
        (b"\x80\x04N", "cannot be read"),
    ],
)
def test_index_of_another_kind_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_shapes(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [".metadata", "index.json"])
@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_damaged_index_is_never_a_crash(
    data: st.DataObject, name: str, old: Path, saved: Path
) -> None:
    """Any byte changed: the shapes, or a CheckpointError."""
    source = old if name == ".metadata" else saved
    path = source.parent / "damaged"
    path.mkdir(exist_ok=True)
    content = bytearray((source / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    (path / name).write_bytes(content)
    try:
        shapes = read_shapes(path)
    except CheckpointError as error:
        assert name in str(error)
    else:
        assert isinstance(shapes, dict)
