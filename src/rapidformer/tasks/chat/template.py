"""Render turns with the tokenizer's chat template and find the answers in the text.

A template is a program, so nothing is assumed about its output. If it has ``{% generation %}``
marks, they tell where the answers are. Without marks, an answer begins where the conversation
before it, rendered with a generation prompt, ends; that text must be a prefix of the full text. It
ends with the first special token after it, which is where generation stops. Many templates render
the last answer, or what follows it, differently from earlier ones.
"""

from __future__ import annotations

import copy
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.log import get_logger, warn_once
from rapidformer.tasks.chat.turns import BadRowError, Message, is_empty
from rapidformer.tasks.text.text import check_is_fast, get_frame

Span = tuple[int, int]
NO_TEMPLATE = "none"
# The tokenizer's own end-of-text token closes a turn; the rest is ordinary text, so no token is new
# to the model.
_TURNS = (
    "{{% for message in messages %}}"
    "{{{{ {start} + message['content'] + {end} + '\\n' }}}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
)
_PLAIN_TURNS = _TURNS.format(
    start="'<|' + message['role'] + '|>\\n'", end="eos_token", answer="'<|assistant|>\\n'"
)
_CHATML = _TURNS.format(
    start="'<|im_start|>' + message['role'] + '\\n'",
    end="'<|im_end|>'",
    answer="'<|im_start|>assistant\\n'",
)
# Templates with this variable let the prompt supply an empty thought (Qwen3), which is then no part
# of the answer.
_THINKING = "enable_thinking"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWER = "The-answer-is-here"
_SECONDS = 20.0
"""What a template may take for one conversation; a slow one takes milliseconds."""
_EXAMPLE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER})


class ChatTemplate:
    """A tokenizer's template; ``end_of_turn`` is what ends the last answer."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.variables = dict(variables)
        """What the template gets besides the messages."""
        self.text: str = tokenizer.get_chat_template()
        self.has_marks = _MARKED.search(self.text) is not None
        self._takes_parts = self._find_takes_parts()
        self._tail = self._find_tail()
        self.end_of_turn = self._cut_after_special(self._tail)
        self._end_between_turns = self._find_end_between_turns()

    @property
    def closes_answers(self) -> bool:
        """Whether anything that a model could learn to stop at follows an answer."""
        return bool(self._tail.strip())

    def with_tools(self, tools: list[Any] | None) -> ChatTemplate:
        """The same template for a conversation that may call these tools."""
        if tools is None:
            return self
        if "tools" not in self.text:
            warn_once("the chat template does not show tools: the model does not see them.")
        return self.with_variables({"tools": tools})

    def with_variables(self, variables: Mapping[str, Any] | None) -> ChatTemplate:
        """The same template with variables of one row."""
        if not variables:
            return self
        adjusted = copy.copy(self)
        adjusted.variables = {**self.variables, **variables}
        return adjusted

    def render(
        self, messages: Sequence[Message], *, lets_answer: bool = False, **variables: Any
    ) -> str:
        """The conversation as text; ``lets_answer`` adds the generation prompt at the end."""
        variables = {**self.variables, **variables}
        with _reporting_refusals():
            text: str = self._tokenizer.apply_chat_template(
                self._shape(messages), tokenize=False, add_generation_prompt=lets_answer,
                **variables,
            )  # fmt: skip
        return text

    def _shape(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template takes."""
        return [{**turn, "content": self._shape_content(turn["content"])} for turn in messages]

    def _shape_content(self, content: str) -> Any:
        return [{"type": "text", "text": content}] if self._takes_parts else content

    def _find_takes_parts(self) -> bool:
        """Whether it shows messages only as lists of parts, as for many models that also see."""
        return (
            "type" in self.text
            and not self._shows(_EXAMPLE, _ANSWER, takes_parts=False)
            and self._shows(_EXAMPLE, _ANSWER, takes_parts=True)
        )

    def _shows(self, messages: Sequence[Message], text: str, *, takes_parts: bool) -> bool:
        """Whether the messages in this form are rendered with the text."""
        self._takes_parts = takes_parts
        try:
            shown = self.render(messages)
        except BadRowError:
            return False
        # A template for text alone may print a list of parts as it is.
        return text in shown and not (takes_parts and "'type'" in shown)

    def render_with_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The conversation as text, and the span of each answer in it."""
        if self.has_marks:
            return self._render_marked(messages)
        text = self.render(messages)
        messages = self._drop_unused_system(messages, text)
        spans = []
        for number, message in enumerate(messages):
            # An opening turn by the assistant answers nothing.
            if message["role"] != "assistant" or number == 0 or is_empty(message):
                continue
            start = self._find_start(text, messages[:number])
            end = self._find_end(text, start, messages, number)
            _check_shows_calls(message, text[start:end])
            if text[start:end].strip() in ("", self.end_of_turn.strip()):
                raise BadRowError("has an answer of which the chat template shows nothing")
            spans.append((start, end))
        return text, spans

    def get_stop_id(self) -> int | None:
        """The token that ends an answer, if it is one that cannot occur in ordinary text."""
        ids = self._tokenizer(self.end_of_turn, add_special_tokens=False)["input_ids"]
        special = self._get_special_ids()
        return next((int(token) for token in ids if token in special), None)

    def _get_special_ids(self) -> set[int]:
        return {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}

    def _cut_after_special(self, text: str) -> str:
        """The text up to its first special token; all of it but the last spaces if it has none."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        special = self._get_special_ids()
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        end = next((place[1] for token, place in tokens if token in special), None)
        return text.rstrip() if end is None else text[:end]

    def _drop_unused_system(self, messages: Sequence[Message], text: str) -> Sequence[Message]:
        """The turns in the text: Mistral's shows the system message only before an answer."""
        if messages[0]["role"] != "system" or is_empty(messages[0]):
            return messages
        if messages[0]["content"].strip() in text or self.render(messages[1:]) != text:
            return messages
        warn_once(
            "the chat template leaves the system message out of conversations that end with an "
            "answer, so the model is not trained with it: move it into the first user message, or "
            "give --chat-template FILE."
        )
        return messages[1:]

    def _find_start(self, text: str, before: Sequence[Message]) -> int:
        """Where the answer to the turns before it begins."""
        prompt = self.render(before, lets_answer=True)
        self._check_is_prefix(prompt, text)
        if _THINKING in self.text:
            without_thought = self.render(before, lets_answer=True, **{_THINKING: False})
            if len(without_thought) > len(prompt) and text.startswith(without_thought):
                return len(without_thought)
        return len(prompt)

    def _render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with _reporting_refusals():
            # The annotation mentions only the text.
            rendered: Any = render_jinja_template(
                conversations=[self._shape(messages)], chat_template=self.text,
                return_assistant_tokens_mask=True, **self._tokenizer.special_tokens_map,
                **self.variables,
            )  # fmt: skip
        (text,), (marks,) = rendered
        for message in messages:
            _check_shows_calls(message, text)
        # If the marks stop before the end of the turn, the model would never learn to stop.
        return text, [(start, self._pass_end(text, end)) for start, end in marks if end > start]

    def _pass_end(self, text: str, place: int) -> int:
        ends = (self.end_of_turn, self._end_between_turns)
        return place + next((len(end) for end in ends if text.startswith(end, place)), 0)

    def _check_is_prefix(self, before: str, text: str) -> None:
        if text.startswith(before):
            return
        place = next(
            (n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text)
        )
        raise ModelError(
            "the chat template renders the beginning of a conversation differently on its own "
            f"({before[place : place + 40]!r}) and inside the full text "
            f"({text[place : place + 40]!r}), so the answers cannot be located: give "
            "--chat-template FILE with {% generation %} ... {% endgeneration %} around the "
            "answers, or --train-on-prompts."
        )

    def _find_end(self, text: str, start: int, messages: Sequence[Message], number: int) -> int:
        if number == len(messages) - 1:
            return self._find_end_of_text(text)
        upto = self.render(messages[: number + 1])
        if text.startswith(upto):
            return self._find_end_of_text(upto)
        # Rendered up to here, this is the last answer, which this template renders differently.
        content, end = messages[number]["content"].strip(), self._end_between_turns
        said = text.find(content, start)
        after = said + len(content) if said >= 0 else start
        stop = text.find(end, after) if end else -1
        later = (message["content"].strip() for message in messages[number + 1 :])
        if stop >= 0 and not any(turn in text[after:stop] for turn in later if turn):
            return stop + len(end)
        shown = upto.rstrip().removesuffix(self.end_of_turn).rstrip()
        self._check_is_prefix(shown, text)
        return len(shown)

    def _find_end_of_text(self, text: str) -> int:
        """Where the last answer of a rendered conversation ends."""
        if self._tail and text.endswith(self._tail):
            return len(text) - len(self._tail) + len(self.end_of_turn)
        return len(text.rstrip())

    def _find_tail(self) -> str:
        """What follows the last answer."""
        try:
            text = self.render(_EXAMPLE)
        except BadRowError as reason:
            raise ModelError(
                f"the chat template cannot be used: a test with a question and an answer {reason}."
            ) from None
        _, marker, rest = text.rpartition(_ANSWER)
        if not marker:
            raise ModelError("the chat template omits the assistant's answers.")
        return rest

    def _find_end_between_turns(self) -> str:
        """What follows an earlier answer: the first tokens that the last one's have, too."""
        try:
            _, *rests = self.render(_EXAMPLE * 2).split(_ANSWER)
        except BadRowError:
            return ""
        if len(rests) != 2:
            return ""
        encoded = self._tokenizer(rests, add_special_tokens=False, return_offsets_mapping=True)
        tokens = zip(*encoded["input_ids"], encoded["offset_mapping"][0], strict=False)
        alike = takewhile(lambda token: token[0] == token[1], tokens)
        length = max((end for _, _, (_, end) in alike), default=0)
        return self._cut_after_special(rests[0][:length])


def _check_shows_calls(message: Message, text: str) -> None:
    """Refuse a tool call that the template leaves out: the model would learn to say nothing."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if str(function.get("name", "")) not in text:
            raise BadRowError(
                f"calls the tool {function['name']!r}, which the chat template leaves out: give "
                "--chat-template FILE with one that shows tool calls"
            )


@contextmanager
def _reporting_refusals() -> Iterator[None]:
    """A template is a program: it may raise anything, and need not end."""
    try:
        with _ending_in_time():
            yield
    except MemoryError:
        raise
    except Exception as reason:
        text = str(reason) or type(reason).__name__
        raise BadRowError(f"is refused by the chat template: {text}") from None


@contextmanager
def _ending_in_time() -> Iterator[None]:
    """Raise after a while; only a process's main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"it was not rendered within {_SECONDS:.0f} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)


def choose_template(
    tokenizer: Any,
    wanted: str | None,
    variables: Mapping[str, Any],
    *,
    needs_one: bool,
    build: Callable[[Any, Mapping[str, Any]], ChatTemplate] | None = None,
) -> ChatTemplate | None:
    """--chat-template, the tokenizer's own, or the default if one is needed; saved with it."""
    if wanted == NO_TEMPLATE:
        if needs_one:
            raise ConfigurationError(
                f"--chat-template {NO_TEMPLATE} works only for prompts and answers: conversations "
                "need a template."
            )
        return None
    if wanted is not None:
        tokenizer.chat_template = _read_template(wanted)
    elif tokenizer.chat_template is None:
        if not needs_one:
            return None
        tokenizer.chat_template = _build_default(tokenizer)
        get_logger().info(
            "chat      the tokenizer has no chat template: turns are rendered as %r; use "
            "--chat-template FILE for a different one",
            _show(tokenizer),
        )
    check_is_fast(tokenizer, "chat data")
    return (build or ChatTemplate)(tokenizer, variables)


def _read_template(text_or_path: str) -> str:
    if "{" in text_or_path:
        return text_or_path
    path = Path(text_or_path).expanduser()
    if not path.is_file():
        raise ConfigurationError(
            f"--chat-template {text_or_path}: this is neither a file nor a Jinja template."
        )
    return path.read_text(encoding="utf-8")


def _build_default(tokenizer: Any) -> str:
    vocabulary = tokenizer.get_vocab()
    if "<|im_start|>" in vocabulary and "<|im_end|>" in vocabulary:
        turns = _CHATML
    elif tokenizer.eos_token is not None:
        turns = _PLAIN_TURNS
    else:
        raise ModelError(
            "the tokenizer has neither a chat template nor an end-of-text token to close a turn "
            "with: give --chat-template FILE."
        )
    begins = get_frame(tokenizer)[0] == [tokenizer.bos_token_id]
    return "{{ bos_token }}" * begins + turns


def _show(tokenizer: Any) -> str:
    turns = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False))
