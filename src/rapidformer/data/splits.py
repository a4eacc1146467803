"""Which split a name means; files, folders and Hub data sets all use different names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rapidformer.data.files import check_not_empty
from rapidformer.errors import DataError
from rapidformer.log import get_logger

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "predict": "test",
    "prediction": "test",
}


def get_split_name(name: str) -> str | None:
    """Train, validation or test for the name of a split or file; None if it says nothing.

    Of GLUE's two validation sets, the matched one is the validation set.
    """
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    if "mismatched" in words:
        return None
    for word in words:
        if word in _SPLIT_WORDS:
            return _SPLIT_WORDS[word]
    return None


def name_splits(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Any mapping of splits under our three names; if several match, the first is kept."""
    splits: dict[str, Any] = {}
    left_out: list[str] = []
    for name, rows in found.items():
        split = get_split_name(name)
        if split is None or split in splits:
            left_out.append(name)
        else:
            splits[split] = check_not_empty(rows, f"{source} ({name})")
    if not splits and len(found) == 1:
        splits["train"] = next(iter(found.values()))
    elif left_out:
        get_logger().info("%s: the splits %s are not used.", source, ", ".join(left_out))
    if not splits:
        raise DataError(
            f"{source} has the splits {', '.join(found)}: none of them is named train, "
            "validation or test. Give files with --train-data and --valid-data."
        )
    return splits
