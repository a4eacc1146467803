"""``state/.metadata``: torch's own index, a pickle.

It is written for torch's tools. We read it only in checkpoints from before ``index.json``, and
without unpickling: its opcodes are followed as a description of data. Every object becomes an inert
record of its class's name and its content, so no class is imported, no function is called and no
attribute is set, whatever the file says.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rapidformer.checkpoint.index import (
    Entry,
    Index,
    Part,
    Sizes,
    to_count,
    to_dtype,
    to_file_name,
    to_sizes,
)
from rapidformer.compat.torch_distributed import PLACE, build_place
from rapidformer.errors import CheckpointError

TORCH_INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_MARK = object()
_Stack = list[Any]


class _Name:
    """A class or function, which is never looked up."""

    def __init__(self, module: Any, name: Any) -> None:
        self.path = f"{_as_text(module)}.{_as_text(name)}"


class _Record:
    """An object: its class, the arguments that it is built from, and its state."""

    def __init__(self, kind: Any, arguments: Any) -> None:
        if not isinstance(kind, _Name) or not isinstance(arguments, tuple):
            raise ValueError("something that is not a class is called")
        self.kind, self.arguments = kind.path, arguments
        self.state: Any = None

    def get(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{self.kind} without {name}")
        return self.state[name]


def to_metadata(index: Index) -> Metadata:
    """The index as torch's checkpoints know it."""
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                    for part in entry.parts
                ],
            )
            for name, entry in index.items()
        },
        storage_data={
            MetadataIndex(name, torch.Size(part.offsets)): build_place(
                part.file, part.start, part.length
            )
            for name, entry in index.items()
            for part in entry.parts
        },
        planner_data={name: (name,) for name in index},
    )


def write_torch_index(index: Index, folder: Path) -> None:
    """Write the index for torch's own tools."""
    (folder / TORCH_INDEX).write_bytes(pickle.dumps(to_metadata(index), protocol=4))


def read_torch_index(folder: Path) -> Index:
    """The index of a folder's tensors; check it before use."""
    path = folder / TORCH_INDEX
    try:
        if not path.is_file():  # a named pipe is not: reading it would never end
            raise ValueError("no such file")
        return _to_index(_parse(path.read_bytes()))
    except (LookupError, TypeError, ValueError, OSError, RecursionError) as reason:
        raise CheckpointError(f"{path} cannot be read: {reason}") from None


def _to_index(metadata: Any) -> Index:
    _expect(metadata, f"{_METADATA}.Metadata")
    places: dict[tuple[str, Sizes], _Record] = {}
    for key, place in _as_dict(metadata.get("storage_data")).items():
        _expect(key, f"{_METADATA}.MetadataIndex")
        _expect(place, PLACE)
        places[_as_text(key.get("fqn")), _to_size(key.get("offset"))] = place
    return {
        _as_text(name): _to_entry(_as_text(name), entry, places)
        for name, entry in _as_dict(metadata.get("state_dict_metadata")).items()
    }


def _to_entry(name: str, entry: Any, places: dict[tuple[str, Sizes], _Record]) -> Entry:
    _expect(entry, f"{_METADATA}.TensorStorageMetadata")
    properties = entry.get("properties")
    _expect(properties, f"{_METADATA}.TensorProperties")
    parts = []
    for chunk in _as_list(entry.get("chunks")):
        _expect(chunk, f"{_METADATA}.ChunkStorageMetadata")
        offsets = _to_size(chunk.get("offsets"))
        if (name, offsets) not in places:
            raise ValueError(f"a part of {name} is nowhere")
        place = places[name, offsets]
        parts.append(
            Part(
                offsets=offsets,
                sizes=_to_size(chunk.get("sizes")),
                file=to_file_name(place.get("relative_path")),
                start=to_count(place.get("offset")),
                length=to_count(place.get("length")),
            )
        )
    dtype = properties.state[0] if isinstance(properties.state, tuple) else None
    path = dtype.path if isinstance(dtype, _Name) else ""
    return Entry(
        dtype=to_dtype(path.removeprefix("torch.")),
        shape=_to_size(entry.get("size")),
        parts=tuple(parts),
    )


def _to_size(record: Any) -> Sizes:
    _expect(record, "torch.Size")
    (values,) = record.arguments
    return to_sizes(values)


def _expect(value: Any, kind: str) -> None:
    found = value.kind if isinstance(value, _Record) else type(value).__name__
    if found != kind:
        raise ValueError(f"it has {found} in place of {kind}")


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value


def _as_dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("a list of tensors is malformed")
    return value


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list of parts is malformed")
    return value


# ---- the opcodes that torch's index consists of ----------------------------------------------


def _parse(content: bytes) -> Any:
    stack: _Stack = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](stack)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it uses the opcode {name}, which no checkpoint needs")
    raise ValueError("it is cut off")


def _pop_to_mark(stack: _Stack) -> list[Any]:
    found: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        found.append(value)
    return found[::-1]


def _pop_two(stack: _Stack) -> list[Any]:
    last = stack.pop()
    return [stack.pop(), last]


def _extend(stack: _Stack, values: list[Any]) -> None:
    _as_list(stack[-1]).extend(values)


def _set_items(stack: _Stack, values: list[Any]) -> None:
    target = _as_dict(stack[-1])
    for key, value in zip(values[::2], values[1::2], strict=True):
        # No tuples: hashing one that is nested cleverly takes forever.
        if not isinstance(key, (str, _Record)):
            raise ValueError("a key is neither a name nor an object")
        target[key] = value


def _set_state(stack: _Stack) -> None:
    state = stack.pop()
    if not isinstance(stack[-1], _Record):
        raise ValueError("something that is not an object is given a state")
    stack[-1].state = state


_LITERALS = ("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}
_ACTIONS: dict[str, Callable[[_Stack], None]] = {
    "STACK_GLOBAL": lambda stack: stack.append(_Name(*_pop_two(stack))),
    "NEWOBJ": lambda stack: stack.append(_Record(*_pop_two(stack))),
    "REDUCE": lambda stack: stack.append(_Record(*_pop_two(stack))),
    "BUILD": _set_state,
    "TUPLE1": lambda stack: stack.append((stack.pop(),)),
    "TUPLE2": lambda stack: stack.append(tuple(_pop_two(stack))),
    "TUPLE3": lambda stack: stack.append((*reversed([stack.pop() for _ in range(3)]),)),
    "TUPLE": lambda stack: stack.append(tuple(_pop_to_mark(stack))),
    "APPEND": lambda stack: _extend(stack, [stack.pop()]),
    "APPENDS": lambda stack: _extend(stack, _pop_to_mark(stack)),
    "SETITEM": lambda stack: _set_items(stack, _pop_two(stack)),
    "SETITEMS": lambda stack: _set_items(stack, _pop_to_mark(stack)),
}
