"""The facts about a pair of files that ``rapidformer data info`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.data.indexed.layout import (
    IndexedDataError,
    get_data_path,
    get_index_path,
    is_file,
    strip_ending,
)
from rapidformer.data.indexed.reader import IndexedDataset


def describe_indexed(prefix: str | Path) -> dict[str, Any]:
    """Counts, types, bytes and lengths of a pair, after checking its whole index.

    For a damaged pair: its ``damage``, a list of reasons, instead of the counts.
    """
    stem = strip_ending(prefix)
    facts: dict[str, Any] = {
        "prefix": stem,
        "bin_bytes": _get_bytes(get_data_path(stem)),
        "idx_bytes": _get_bytes(get_index_path(stem)),
        "damage": [],
    }
    try:
        dataset = IndexedDataset(stem)
        dataset.check()
    except IndexedDataError as error:
        return facts | {"damage": error.problems}
    return facts | {
        "format": dataset.format,
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "multimodal": dataset.modes is not None,
        "document_length": _describe_lengths(measure_documents(dataset)),
        "sequence_length": _describe_lengths(dataset.sizes),
    }


def measure_documents(dataset: IndexedDataset) -> np.ndarray:
    """Tokens per document."""
    ends = np.zeros(len(dataset) + 1, np.int64)
    np.cumsum(dataset.sizes, out=ends[1:])
    return np.diff(ends[dataset.doc_idx])


def _describe_lengths(lengths: np.ndarray) -> dict[str, float] | None:
    if lengths.size == 0:
        return None
    return {
        "min": int(lengths.min()),
        "mean": round(float(lengths.mean()), 2),
        "median": float(np.median(lengths)),
        "max": int(lengths.max()),
    }


def _get_bytes(path: Path) -> int | None:
    return path.stat().st_size if is_file(path) else None
