"""Check the index of a checkpoint's tensors before anything is read by it.

torch trusts its index: it opens any file that is named there, and leaves parts of a tensor that no
entry covers as they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from rapidformer.errors import CheckpointError

_MOST_CELLS = 10_000_000


def check_index(metadata: Metadata, folder: Path) -> None:
    """Refuse an index that leaves gaps, or leads to anything but the folder's own files."""
    for problem in find_index_problems(metadata, folder):
        raise CheckpointError(
            f"{folder / '.metadata'} is not the index of a checkpoint: {problem}."
        )


def find_index_problems(metadata: Metadata, folder: Path) -> Iterator[str]:
    """Every tensor that is not covered, and every place that does not exist."""
    try:
        yield from _find_problems(metadata, folder)
    except (AttributeError, TypeError, ValueError, OSError) as reason:
        yield f"it is malformed ({reason})"


def _find_problems(metadata: Metadata, folder: Path) -> Iterator[str]:
    places: dict[Any, Any] = metadata.storage_data or {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not _covers(entry):
            yield f"its parts do not make up the whole of {name}"
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                yield f"a part of {name} is nowhere"
            elif place.length < prod(chunk.sizes) * entry.properties.dtype.itemsize:
                yield f"a part of {name} has {place.length} bytes, too few for {list(chunk.sizes)}"
    by_file: dict[str, list[Any]] = defaultdict(list)
    for place in places.values():
        by_file[place.relative_path].append(place)
    for file, own in by_file.items():
        size = _measure(folder, file)
        if size is None:
            yield f"it refers to {file}, which is not a file of this folder"
        elif any(p.offset < 0 or p.length < 0 or p.offset + p.length > size for p in own):
            yield f"it refers to bytes that {file} does not have"


def _measure(folder: Path, file: str) -> int | None:
    is_here = Path(file).name == file and (folder / file).is_file()
    return (folder / file).stat().st_size if is_here else None


def _covers(entry: TensorStorageMetadata) -> bool:
    """Whether the chunks lie within the tensor, and every element is in one of them."""
    shape = tuple(entry.size)
    if prod(shape) == 0:
        return True
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    for start, size in boxes:
        if len(start) != len(shape) or len(size) != len(shape):
            return False
        if any(a < 0 or b < 0 or a + b > n for a, b, n in zip(start, size, shape, strict=True)):
            return False
    # Where chunks begin and end cuts the tensor into cells, each of them covered or not.
    edges = [
        np.unique([0, n, *(s[i] for s, _ in boxes), *(s[i] + z[i] for s, z in boxes)])
        for i, n in enumerate(shape)
    ]
    cells = [len(edge) - 1 for edge in edges]
    if prod(cells) > _MOST_CELLS:
        return False
    is_covered = np.zeros(cells, dtype=bool)
    for start, size in boxes:
        region = tuple(
            slice(np.searchsorted(edge, a), np.searchsorted(edge, a + b))
            for edge, a, b in zip(edges, start, size, strict=True)
        )
        is_covered[region] = True
    return bool(is_covered.all())
