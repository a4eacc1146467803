"""A small part of Go's text/template: what is used of it in the templates for Ollama."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any


def render_go(template: str, conversation: list[dict[str, str]]) -> str:
    """As Ollama renders a conversation."""
    parts = iter(re.split(r"{{ (.*?) }}", template))
    scope = {
        "System": "\n\n".join(m["content"] for m in conversation if m["role"] == "system"),
        "Messages": conversation,
    }
    return _render_block(_parse(parts), scope, 0)


def _parse(parts: Iterator[str]) -> list[Any]:
    """Texts, and actions as lists: the words, then what is inside, then what is after ``else``."""
    block: list[Any] = [next(parts)]
    for words in parts:
        if words == "end" or words.startswith("else"):
            return [*block, words]
        node: list[Any] = [words]
        while words.startswith(("if", "range")) or words.startswith("else"):
            inner = _parse(parts)
            words = inner.pop()
            node.append(inner)
            if words == "end":
                break
            node.append(words.removeprefix("else").strip())
        block += [node, next(parts)]
    return block


def _render_block(block: list[Any], scope: dict[str, Any], number: int) -> str:
    return "".join(
        part if isinstance(part, str) else _render_action(part, scope, number) for part in block
    )


def _render_action(node: list[Any], scope: dict[str, Any], number: int) -> str:
    words, *rest = node
    if words.startswith("range"):
        return "".join(
            _render_block(rest[0], {**scope, "Role": m["role"], "Content": m["content"]}, i)
            for i, m in enumerate(scope["Messages"])
        )
    if not words.startswith("if"):
        return str(scope[words.removeprefix(".")])
    test: str = words.removeprefix("if ")
    while True:
        if not test or _holds(test, scope, number):
            return _render_block(rest[0], scope, number)
        if len(rest) < 2:
            return ""
        test, rest = rest[1].removeprefix("if "), rest[2:]


def _holds(test: str, scope: dict[str, Any], number: int) -> bool:
    if test.startswith("eq (len"):
        return number == len(scope["Messages"]) - 1
    if test.startswith("eq .Role"):
        return bool(scope["Role"] == test.split('"')[1])
    return bool(scope[test.removeprefix(".")])
