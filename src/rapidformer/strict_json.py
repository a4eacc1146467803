"""JSON that every parser reads: Python writes ``NaN`` and ``Infinity``, which are not JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def format_json(
    value: Any,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """The value as JSON; numbers that are not finite become null."""
    return json.dumps(
        drop_not_finite(value),
        indent=indent,
        sort_keys=sort_keys,
        default=default,
        ensure_ascii=False,
        allow_nan=False,
    )


def drop_not_finite(value: Any) -> Any:
    """The same dictionaries and lists, with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: drop_not_finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [drop_not_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
