"""Convert callers' tokens and counts to the types of the files.

numpy silently wraps an id that is too large for its type around to another id. Here it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rapidformer.data.indexed.layout import DTYPES, IndexedDataError


def choose_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The smallest type for a vocabulary's ids, by Megatron's rule."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def get_dtype_code(dtype: np.dtype[Any]) -> int:
    """The code for a type in an index."""
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    names = ", ".join(known.name for known in DTYPES.values())
    raise IndexedDataError(f"tokens cannot be stored as {dtype.name}: use one of {names}.")


def convert_tokens(tokens: Sequence[int] | np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """The tokens in a type that holds each of them exactly."""
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise IndexedDataError(
            f"tokens have the shape {values.shape}: a sequence has one dimension."
        )
    if values.dtype == dtype or values.size == 0:
        return np.ascontiguousarray(values, dtype)
    if dtype.kind == "f" and values.dtype.kind == "f":
        return values.astype(dtype)
    if values.dtype.kind not in "iu":
        raise IndexedDataError(f"tokens are {values.dtype}: ids are whole numbers.")
    low, high = int(values.min()), int(values.max())
    least, most = _get_limits(dtype)
    if low < least or high > most:
        raise IndexedDataError(
            f"token id {low if low < least else high} does not fit {dtype.name} ({least} to "
            f"{most}): take the type from choose_dtype(vocab_size), with the size of the "
            "tokenizer's whole vocabulary."
        )
    return values.astype(dtype)


def convert_counts(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Lengths or sequence counts as int64."""
    counts = np.asarray(values)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise IndexedDataError(
            f"{name} are {counts.dtype} of shape {counts.shape}: give a list of whole numbers."
        )
    if counts.size and counts.min() < 0:
        raise IndexedDataError(f"{name} hold {counts.min()}: a count is not negative.")
    return counts.astype(np.int64)


def _get_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind != "f":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    exact = 2 ** (int(np.finfo(dtype).nmant) + 1)  # beyond this, floats skip integers
    return -exact, exact
