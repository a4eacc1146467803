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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata

from rapidformer.checkpoint.index import Entry, Index, Sizes, build_part, to_dtype, to_sizes
from rapidformer.compat.torch_distributed import PLACE, build_place
from rapidformer.errors import CheckpointError

TORCH_INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_MARK = object()
_Stack = list[Any]
_T = TypeVar("_T", str, dict[Any, Any], list[Any])


@dataclass(frozen=True)
class _Name:
    """A class or function, which is never looked up."""

    path: str


@dataclass(eq=False)
class _Record:
    """An object: its class, the arguments that it is built from, and its state."""

    kind: str
    arguments: tuple[Any, ...]
    state: Any = None


def to_metadata(index: Index) -> metadata.Metadata:
    """The index as torch's checkpoints know it."""
    return metadata.Metadata(
        state_dict_metadata={
            name: metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    metadata.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
                    for part in entry.parts
                ],
            )
            for name, entry in index.items()
        },
        storage_data={
            metadata.MetadataIndex(name, torch.Size(part.offsets)): build_place(
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


def _to_index(content: Any) -> Index:
    storage, tensors = _read(content, "Metadata", "storage_data", "state_dict_metadata")
    places: dict[tuple[str, Sizes], list[Any]] = {}
    for key, place in _as(dict, storage).items():
        name, offset = _read(key, "MetadataIndex", "fqn", "offset")
        places[_as(str, name), _to_size(offset)] = _read(
            place, PLACE, "relative_path", "offset", "length"
        )
    return {
        _as(str, name): _to_entry(_as(str, name), entry, places)
        for name, entry in _as(dict, tensors).items()
    }


def _to_entry(name: str, entry: Any, places: dict[tuple[str, Sizes], list[Any]]) -> Entry:
    properties, chunks, size = _read(entry, "TensorStorageMetadata", "properties", "chunks", "size")
    _read(properties, "TensorProperties")
    parts = []
    for chunk in _as(list, chunks):
        offsets, sizes = map(_to_size, _read(chunk, "ChunkStorageMetadata", "offsets", "sizes"))
        if (name, offsets) not in places:
            raise ValueError(f"a part of {name} is nowhere")
        parts.append(build_part(offsets, sizes, *places[name, offsets]))
    dtype = properties.state[0] if isinstance(properties.state, tuple) else None
    path = dtype.path if isinstance(dtype, _Name) else ""
    return Entry(to_dtype(path.removeprefix("torch.")), _to_size(size), parts)


def _to_size(record: Any) -> Sizes:
    _read(record, "torch.Size")
    (values,) = record.arguments
    return to_sizes(values)


def _read(value: Any, kind: str, *names: str) -> list[Any]:
    """These attributes of a record, which must be of this class."""
    wanted = kind if "." in kind else f"{_METADATA}.{kind}"
    actual = value.kind if isinstance(value, _Record) else type(value).__name__
    if actual != wanted:
        raise ValueError(f"it has {actual} in place of {wanted}")
    for name in names:
        if not isinstance(value.state, dict) or name not in value.state:
            raise ValueError(f"{wanted} without {name}")
    return [value.state[name] for name in names]


_PROBLEMS: dict[type, str] = {
    str: "a name is not text",
    dict: "a list of tensors is malformed",
    list: "a list of parts is malformed",
}


def _as(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise ValueError(_PROBLEMS[kind])
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
        elif name in _BUILDERS:
            stack.append(_BUILDERS[name](stack))
        elif name in _CHANGES:
            _CHANGES[name](stack)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it uses the opcode {name}, which no checkpoint needs")
    raise ValueError("it is cut off")


def _pop(stack: _Stack, count: int) -> list[Any]:
    return [stack.pop() for _ in range(count)][::-1]


def _pop_to_mark(stack: _Stack) -> list[Any]:
    values: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _build_name(stack: _Stack) -> _Name:
    module, name = _pop(stack, 2)
    return _Name(f"{_as(str, module)}.{_as(str, name)}")


def _build_record(stack: _Stack) -> _Record:
    kind, arguments = _pop(stack, 2)
    if not isinstance(kind, _Name) or not isinstance(arguments, tuple):
        raise ValueError("something that is not a class is called")
    return _Record(kind.path, arguments)


def _extend(stack: _Stack, values: list[Any]) -> None:
    _as(list, stack[-1]).extend(values)


def _set_items(stack: _Stack, values: list[Any]) -> None:
    target = _as(dict, stack[-1])
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
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "MARK": lambda: _MARK,
}  # fmt: skip
_BUILDERS: dict[str, Callable[[_Stack], Any]] = {
    "STACK_GLOBAL": _build_name, "NEWOBJ": _build_record, "REDUCE": _build_record,
    "TUPLE1": lambda stack: tuple(_pop(stack, 1)),
    "TUPLE2": lambda stack: tuple(_pop(stack, 2)),
    "TUPLE3": lambda stack: tuple(_pop(stack, 3)),
    "TUPLE": lambda stack: tuple(_pop_to_mark(stack)),
}  # fmt: skip
_CHANGES: dict[str, Callable[[_Stack], None]] = {
    "BUILD": _set_state,
    "APPEND": lambda stack: _extend(stack, [stack.pop()]),
    "APPENDS": lambda stack: _extend(stack, _pop_to_mark(stack)),
    "SETITEM": lambda stack: _set_items(stack, _pop(stack, 2)),
    "SETITEMS": lambda stack: _set_items(stack, _pop_to_mark(stack)),
}
