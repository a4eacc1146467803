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

from rapidformer.checkpoint.tensors import load_tensors, read_shapes, save_tensors
from rapidformer.dist.topology import Topology
from rapidformer.errors import CheckpointError


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


def test_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    """torch raises a BaseException of its own: nobody's `except Exception` would see it."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file/state"):
        save_tensors({"a": torch.zeros(1)}, tmp_path / "file" / "state")


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        read_shapes(tmp_path / "none")


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
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
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
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        read_shapes(tmp_path)
    assert not mark.exists()


def test_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="is not the index of a checkpoint"):
        read_shapes(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_index_is_never_a_crash(data: st.DataObject, saved: Path) -> None:
    """Any byte changed: the shapes, or a CheckpointError."""
    path = saved.parent / "damaged"
    path.mkdir(exist_ok=True)
    content = bytearray((saved / ".metadata").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    (path / ".metadata").write_bytes(content)
    try:
        shapes = read_shapes(path)
    except CheckpointError as error:
        assert ".metadata" in str(error)
    else:
        assert isinstance(shapes, dict)
