"""JSON that every parser reads, and JSON from strangers: what is wrong is a ``ValueError``."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What the text says; a text that cannot be read, for whatever reason, is a ``ValueError``."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """The object that the text is; None for anything else, such as a line that was cut off."""
    try:
        content = parse_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def describe_fault(error: ValueError) -> str:
    """What is wrong with a line of JSON, and where in it."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return str(error)


def format_json(value: Any, **options: Any) -> str:
    """The value as JSON, with options of ``json.dumps``; numbers that are not finite are null."""
    try:
        # Almost always there is nothing to replace, and looking for it takes longer than writing.
        return _encode(value, **options)
    except ValueError:
        return _encode(drop_not_finite(value), **options)


def _encode(value: Any, **options: Any) -> str:
    # json.dumps() makes an encoder for each call.
    encoder = (
        json.JSONEncoder(ensure_ascii=False, allow_nan=False, **options) if options else _PLAIN
    )
    return encoder.encode(value)


_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def drop_not_finite(value: Any) -> Any:
    """The same dictionaries and lists, with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: drop_not_finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [drop_not_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
