"""Ollama's Modelfile: the chat template in Go's language, proven equal to the tokenizer's in Jinja.

The text around each message is found by rendering a conversation of marks. Several conversations
are put together from it, as Ollama will do. If one of them differs from the tokenizer's own
rendering, the file gets no TEMPLATE and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


SAMPLES = (
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

    def join(self, conversation: Conversation) -> str:
        """The prompt for the next answer."""
        prompts = [message["content"] for message in conversation if message["role"] == "system"]
        text = self.begin
        if self.system is not None and prompts:
            text = self.system[0] + "\n\n".join(prompts) + self.system[1]
        for number, message in enumerate(conversation, start=1):
            if message["role"] == "user":
                after = self.last if number == len(conversation) else self.answer
                text += message["content"] + after
            elif message["role"] == "assistant":
                text += message["content"] + self.question
        return text


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
    source = f"FROM ./{model}"
    turns = read_turns(tokenizer) if get_chat_template(tokenizer) else None
    bos = (tokenizer.bos_token or "") if metadata["tokenizer.ggml.add_bos_token"] else ""
    try:
        if turns is None:
            raise _NoTemplateError("there is no chat template that writes messages one by one")
        # Ollama adds the first token itself where the file says so.
        system = turns.system and (turns.system[0].removeprefix(bos), turns.system[1])
        own = replace(turns, begin=turns.begin.removeprefix(bos), system=system)
        lines, said = [source, f'TEMPLATE """{translate(own)}"""'], _prove(tokenizer, own, bos)
    except _NoTemplateError as reason:
        said = f"Modelfile without a TEMPLATE: {reason}"
        lines = [f"# No TEMPLATE: {reason}.", source]
    length = next(value for key, value in metadata.items() if key.endswith(".context_length"))
    lines.append(f"PARAMETER num_ctx {length}")
    end = find_end(tokenizer, turns) if turns else None
    if end is not None:
        lines.append(f'PARAMETER stop "{end}"')
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    get_logger().info("ollama    %s", said)


def _prove(tokenizer: Any, turns: Turns, bos: str) -> str:
    """Render conversations as Ollama will; returns what is proven."""
    samples = [talk for talk in SAMPLES if turns.system or talk[0]["role"] != "system"]
    for talk in samples:
        if bos + turns.join(talk) != render(tokenizer, talk):
            raise _NoTemplateError(
                f"no simple template gives what the tokenizer's gives for {len(talk)} messages"
            )
    text = f"Modelfile: TEMPLATE equal to the chat template for {len(samples)} conversations"
    if not turns.system:
        text += "; the chat template takes no system prompt, so Ollama's is left out"
    try:
        is_kept = bos + turns.join(_SPACED) == render(tokenizer, _SPACED)
    except _NoTemplateError:
        is_kept = False
    return text if is_kept else f"{text}; it keeps spaces around a message, which theirs removes"


def translate(turns: Turns) -> str:
    """``turns.join`` in Go's language."""
    begin, around = turns.begin, turns.system
    pieces = [begin, turns.answer, turns.question, turns.last, *(around or ())]
    if any("{{" in piece + "{" or '"""' in piece for piece in pieces):
        raise _NoTemplateError('the text around messages has {{ or """ in it')
    if around is not None:
        begin = (
            f"{{{{ if .System }}}}{around[0]}{{{{ .System }}}}{around[1]}"
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
