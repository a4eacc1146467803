"""Check the index of a checkpoint's tensors before anything is read by it.

torch trusts its index: it opens any file that is named there, and leaves parts of a tensor that no
entry covers as they were.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from rapidformer.errors import CheckpointError

_MOST_CELLS = 10_000_000


def check_index(metadata: Metadata, folder: Path) -> None:
    """Refuse an index that leaves gaps, or leads to anything but the folder's own files."""
    try:
        problem = _find_problem(metadata, folder)
    except (AttributeError, TypeError, ValueError, OSError) as reason:
        problem = f"it is malformed ({reason})"
    if problem:
        raise CheckpointError(
            f"{folder / '.metadata'} is not the index of a checkpoint: {problem}."
        )


def _find_problem(metadata: Metadata, folder: Path) -> str | None:
    places: dict[Any, Any] = metadata.storage_data or {}
    sizes: dict[str, int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not _covers(entry):
            return f"its parts do not make up the whole of {name}"
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in places:
                return f"a part of {name} is nowhere"
    for place in places.values():
        file = place.relative_path
        if file not in sizes:
            if Path(file).name != file or not (folder / file).is_file():
                return f"it refers to {file}, which is not a file of this folder"
            sizes[file] = (folder / file).stat().st_size
        if place.offset < 0 or place.length < 0 or place.offset + place.length > sizes[file]:
            return f"it refers to bytes that {file} does not have"
    return None


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
