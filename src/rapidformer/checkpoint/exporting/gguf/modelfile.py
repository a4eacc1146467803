"""Ollama's Modelfile: the chat template in Go's language, proven equal to the tokenizer's in Jinja.

The text around each message is found by rendering a conversation of marks. It is written as a
template, read back from the file and rendered for several conversations. If one of them differs
from the tokenizer's own rendering, the file gets no TEMPLATE and says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.exporting.gguf.families import Metadata
from rapidformer.checkpoint.exporting.gguf.tokenizer import get_chat_template
from rapidformer.log import get_logger

Conversation = list[dict[str, str]]
_MARKS = ("SYSTEM-MARK", "FIRST-MARK", "ANSWER-MARK", "SECOND-MARK")


def _talk(*texts: str, system: str | None = None) -> Conversation:
    turns = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return turns + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


_SAMPLES = (
    _talk("Hello"),
    _talk("What is 2 + 2?", "4.", "And 3 + 3?"),
    _talk("one", "two", "three", "four", "five"),
    _talk("Zeile 1\n\nZeile 2: \"Größe\" & 'x' <b>{ }</b>", "```\ncode\n```", "naïve 你好 🦙"),
    _talk("Hello", system="You are helpful."),
    _talk("a", "b", "c", system="Two lines.\nOf a system prompt."),
)
_SPACED = _talk(" Hello \n", " Hi \n", " x ")


class _NoTemplateError(Exception):
    """Why Ollama cannot be told how this model talks."""


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the messages of a conversation."""

    begin: str
    """Before the first question, without a system prompt."""
    system: tuple[str, str] | None
    """Before and after a system prompt, up to the first question; None: there may be none."""
    answer: str
    """Between a question and its answer."""
    question: str
    """Between an answer and the next question: it begins with what ends an answer."""
    last: str
    """After the last question."""


def read_turns(tokenizer: Any) -> Turns | None:
    """What the tokenizer's chat template writes around messages; None if it cannot be told."""
    system, first, answer, second = _MARKS
    try:
        text = render(tokenizer, _talk(first, answer, second))
        begin, rest = text.split(first)
        after_question, rest = rest.split(answer)
        after_answer, last = rest.split(second)
    except (_NoTemplateError, ValueError):  # a mark is missing, or there twice
        return None
    try:
        before, rest = render(tokenizer, _talk(first, answer, second, system=system)).split(system)
        around = before, rest.split(first)[0]
    except (_NoTemplateError, ValueError):
        around = None
    return Turns(begin, around, after_question, after_answer, last)


def render(tokenizer: Any, conversation: Conversation) -> str:
    """The prompt for the next answer, as the tokenizer's own template has it."""
    try:
        return str(
            tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        )
    except Exception as reason:  # templates raise errors of their own, to refuse a role
        raise _NoTemplateError(f"the chat template refuses a conversation: {reason}") from reason


def find_end(tokenizer: Any, turns: Turns) -> str | None:
    """The token that ends an answer."""
    specials = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return next((token for token in specials if turns.question.lstrip().startswith(token)), None)


def write_modelfile(file: Path, model: str, tokenizer: Any, metadata: Metadata) -> None:
    """Write what ``ollama create`` reads."""
    lines = [f"FROM ./{model}"]
    turns = read_turns(tokenizer) if get_chat_template(tokenizer) else None
    bos = tokenizer.bos_token if metadata["tokenizer.ggml.add_bos_token"] else ""
    reason: str | None = None
    try:
        if turns is None:
            raise _NoTemplateError("there is no chat template that writes messages one by one")
        lines.append(f'TEMPLATE """{_translate(turns, bos or "")}"""')
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        proven = _prove(file, tokenizer, turns, bos or "")
    except _NoTemplateError as error:
        lines, reason = [f"# No TEMPLATE: {error}.", lines[0]], str(error)
    length = next(value for key, value in metadata.items() if key.endswith(".context_length"))
    lines.append(f"PARAMETER num_ctx {length}")
    end = find_end(tokenizer, turns) if turns else None
    if end is not None:
        lines.append(f'PARAMETER stop "{end}"')
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if reason is None:
        get_logger().info("ollama    Modelfile: %s", proven)
    else:
        get_logger().info("ollama    Modelfile without a TEMPLATE: %s", reason)


def _translate(turns: Turns, bos: str) -> str:
    """The turns in Go's language. Ollama adds the first token itself where the file says so."""
    begin, around = turns.begin.removeprefix(bos), turns.system
    pieces = [begin, turns.answer, turns.question, turns.last, *(around or ())]
    if any("{{" in piece or '"""' in piece for piece in pieces):
        raise _NoTemplateError('the text around messages has {{ or """ in it')
    if around is not None:
        begin = (
            f"{{{{ if .System }}}}{around[0].removeprefix(bos)}{{{{ .System }}}}{around[1]}"
            f"{{{{ else }}}}{begin}{{{{ end }}}}"
        )
    after = turns.answer
    if turns.last != turns.answer:
        after = (
            "{{ if eq (len (slice $.Messages $i)) 1 }}"
            f"{turns.last}{{{{ else }}}}{turns.answer}{{{{ end }}}}"
        )
    return (
        f"{begin}{{{{ range $i, $_ := .Messages }}}}"
        f'{{{{ if eq .Role "user" }}}}{{{{ .Content }}}}{after}'
        f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{turns.question}'
        "{{ end }}{{ end }}"
    )


# ---- the proof -----------------------------------------------------------------------------------


def _prove(file: Path, tokenizer: Any, turns: Turns, bos: str) -> str:
    """Render the file's template as Ollama does; returns what is proven."""
    found = re.search('TEMPLATE """(.*)"""', file.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    samples = [talk for talk in _SAMPLES if turns.system or talk[0]["role"] != "system"]
    for talk in samples:
        wanted, actual = render(tokenizer, talk), bos + render_go(found.group(1), talk)
        if actual != wanted:
            raise _NoTemplateError(
                f"no simple template gives what the tokenizer's gives for {len(talk)} messages"
            )
    text = f"TEMPLATE equal to the chat template for {len(samples)} conversations"
    if not turns.system:
        text += "; the chat template takes no system prompt, so Ollama's is left out"
    try:
        is_kept = render(tokenizer, _SPACED) == bos + render_go(found.group(1), _SPACED)
    except _NoTemplateError:
        is_kept = False
    return text if is_kept else f"{text}; it keeps spaces around a message, which theirs removes"


def render_go(template: str, conversation: Conversation) -> str:
    """What Ollama's engine, Go's text/template, makes of a template that ``_translate`` wrote."""
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
