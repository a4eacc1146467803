"""Check an index against itself and its ``.bin``.

When an index of more than ``THOROUGH_LIMIT`` sequences is opened, only its two ends are checked, so
that ten million documents open in milliseconds. ``IndexedDataset.check()``, ``data info`` and
``data merge`` check every entry, block by block.
"""

from __future__ import annotations

import numpy as np

from rapidformer.data.indexed.index import Index

THOROUGH_LIMIT = 1 << 20
_BLOCK = 1 << 20


def find_problems(index: Index, data_bytes: int, *, thorough: bool = False) -> list[str]:
    """All problems found; if a quick check finds one, everything is checked."""
    problems = _find_bad_ends(index, data_bytes)
    if thorough or problems or index.sizes.size <= THOROUGH_LIMIT or _is_suspect(index):
        checks = (_find_bad_size, _find_bad_pointer, _find_bad_mark)
        problems += [problem for check in checks if (problem := check(index))]
    return problems


def _is_suspect(index: Index) -> bool:
    """Whether the ends show a problem; the thorough check then describes it."""
    last = int(index.pointers[-1]) * index.pointer_bytes
    return bool(index.sizes[-1] < 0 or index.pointers[0] != 0 or last % index.dtype.itemsize)


def _find_bad_ends(index: Index, data_bytes: int) -> list[str]:
    problems = []
    count = index.sizes.size
    if index.doc_idx.size == 0:
        problems.append("it has no document marks; at least the 0 at the start is needed.")
    else:
        if index.doc_idx[0] != 0:
            problems.append(f"the document marks start with {index.doc_idx[0]} instead of 0.")
        if index.doc_idx[-1] != count:
            problems.append(
                f"the document marks end with {index.doc_idx[-1]}, but there are {count} sequences "
                "(merges by Megatron of 2021 lose marks: merge the parts again with "
                "`rapidformer data merge`)."
            )
    end = 0
    if count:
        start = int(index.pointers[-1]) * index.pointer_bytes
        end = start + int(index.sizes[-1]) * index.dtype.itemsize
    if end != data_bytes:
        fault = "was cut short" if data_bytes < end else "has gone on growing"
        problems.append(
            f"the .bin has {data_bytes} bytes, but the last sequence ends at byte {end} "
            f"({index.dtype.name}): the .bin {fault}, or it belongs to another .idx."
        )
    return problems


def _find_bad_size(index: Index) -> str | None:
    for start in range(0, index.sizes.size, _BLOCK):
        block = index.sizes[start : start + _BLOCK]
        if block.min() < 0:
            at = int(np.argmax(block < 0))
            return f"sequence {start + at} has {block[at]} tokens."
    return None


def _find_bad_pointer(index: Index) -> str | None:
    step = index.dtype.itemsize // index.pointer_bytes
    expected_start = 0
    for start in range(0, index.sizes.size, _BLOCK):
        sizes = index.sizes[start : start + _BLOCK]
        # expected[i] is where the sequence after i starts
        expected = np.cumsum(sizes, dtype=np.int64)
        expected *= step
        expected += expected_start
        pointers = index.pointers[start : start + _BLOCK]
        is_wrong = np.empty(len(sizes), bool)
        is_wrong[0] = pointers[0] != expected_start
        np.not_equal(pointers[1:], expected[:-1], out=is_wrong[1:])
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            right = expected_start if at == 0 else int(expected[at - 1])
            return (
                f"sequence {start + at} points to byte {int(pointers[at]) * index.pointer_bytes}, "
                f"but the sequences before it end at byte {right * index.pointer_bytes}."
            )
        expected_start = int(expected[-1])
    return None


def _find_bad_mark(index: Index) -> str | None:
    for start in range(0, index.doc_idx.size - 1, _BLOCK):
        block = index.doc_idx[start : start + _BLOCK + 1]
        is_wrong = block[1:] < block[:-1]
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            return (
                f"the document marks go down from {block[at]} to {block[at + 1]} at document "
                f"{start + at}."
            )
    return None
