"""Megatron's ``.bin/.idx`` files: the tokens of documents on disk, memory-mapped."""

from __future__ import annotations

from rapidformer.data.indexed.layout import (
    IndexedDataError,
    has_indexed,
    list_prefixes,
    strip_ending,
)
from rapidformer.data.indexed.reader import IndexedDataset, merge_indexed, open_indexed
from rapidformer.data.indexed.writer import IndexedWriter, choose_dtype

__all__ = [
    "IndexedDataError",
    "IndexedDataset",
    "IndexedWriter",
    "choose_dtype",
    "has_indexed",
    "list_prefixes",
    "merge_indexed",
    "open_indexed",
    "strip_ending",
]
