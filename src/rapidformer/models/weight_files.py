"""Read weights from safetensors files in part: a rank reads its shard, never the whole.

``transformers`` itself finds the files and renames, merges and converts their contents; here it
just gets tensors without values in place of the files' own. A file is reopened for each tensor,
because the mapped pages of an open file count as this process's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rapidformer.compat.patches import variables
from rapidformer.models.recording import Recording, RecordingError, Spans
from rapidformer.strict_json import parse_json

_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file."""

    path: str
    key: str
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        with _open(self.path) as file:
            return file.get_tensor(self.key)

    def read(self, spans: Spans) -> Tensor:
        """The part of it given by the spans."""
        if not spans:
            return self()
        size = [sum(end - start for start, end in stretches) for stretches in spans]
        if 0 in size:
            return torch.empty(size, dtype=self.dtype)
        with _open(self.path) as file:
            return _read_part(file.get_slice(self.key), spans, [])


def _read_part(whole: Any, spans: Spans, chosen: list[tuple[int, int]]) -> Tensor:
    if len(chosen) == len(spans):
        return whole[tuple(slice(start, end) for start, end in chosen)]
    parts = [_read_part(whole, spans, [*chosen, span]) for span in spans[len(chosen)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))


@contextmanager
def record_files(recording: Recording) -> Iterator[None]:
    """Make ``from_pretrained`` see recorded tensors where it would read files."""
    from transformers import modeling_utils

    module: Any = modeling_utils
    original = module.safe_open
    module.safe_open = lambda path, **options: _RecordedFile(recording, path)
    try:
        with variables({_SYNCHRONOUS: "1"}):  # in this thread, which is the one that records
            yield
    finally:
        module.safe_open = original


class _RecordedFile:
    """The interface of an open safetensors file."""

    def __init__(self, recording: Recording, path: Any) -> None:
        self._recording, self._path = recording, str(path)
        with _open(self._path) as file:
            self._keys, self._metadata = list(file.keys()), file.metadata()

    def keys(self) -> list[str]:
        return self._keys

    def metadata(self) -> Any:
        return self._metadata

    def get_slice(self, key: str) -> _RecordedSlice:
        return _RecordedSlice(self._recording, self._path, key)

    def __enter__(self) -> _RecordedFile:
        return self

    def __exit__(self, *reason: object) -> None: ...


class _RecordedSlice:
    """A tensor of it, before it is read."""

    def __init__(self, recording: Recording, path: str, key: str) -> None:
        with _open(path) as file:
            part = file.get_slice(key)
            self._dtype_name, self._shape = str(part.get_dtype()), list(part.get_shape())
        self._recording, self._path, self._key = recording, path, key

    def get_dtype(self) -> str:
        return self._dtype_name

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        dtype = _DTYPES.get(self._dtype_name)
        if dtype is None:
            raise RecordingError(f"{self._key} in {self._path} holds {self._dtype_name}")
        source = FileTensor(self._path, self._key, dtype)
        return self._recording.add_source(source, self._shape, dtype)[index]


def name_dtype(dtype: torch.dtype) -> str | None:
    """What safetensors calls a type; None if it has no name here."""
    return next((name for name, known in _DTYPES.items() if known == dtype), None)


def read_places(path: Path) -> dict[int, tuple[torch.dtype | None, tuple[int, ...]]]:
    """Type and shape of each tensor of a file, by the place of its first byte; may raise."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(min(length, path.stat().st_size)))
    return {
        8 + length + entry["data_offsets"][0]: (
            _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        )
        for name, entry in header.items()
        if name != "__metadata__" and 0 not in entry["shape"]
    }  # fmt: skip


def list_file_dtypes(folder: Path) -> Counter[torch.dtype]:
    """How many floating-point numbers of each type the safetensors files of a folder hold."""
    counts: Counter[torch.dtype] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with _open(str(path)) as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                part = file.get_slice(key)
                dtype = _DTYPES.get(str(part.get_dtype()))
                if dtype is not None and dtype.is_floating_point:
                    counts[dtype] += prod(part.get_shape())
    return counts


def _open(path: str) -> Any:
    return safe_open(path, framework="pt", device="cpu")
