"""Print an answer while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TextStreamer


class AnswerStreamer(TextStreamer):  # type: ignore[misc]
    """Prints answers word by word, each under its title, and without what stops it.

    The end of the text is held back while it may be the beginning of a stop string.
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str] = (), titles: Sequence[str] = ()
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop_strings = tuple(stop_strings)
        self._titles = iter(titles)
        self._held = ""
        self._is_stopped = False

    def put(self, value: Any) -> None:
        title = next(self._titles, None) if self.next_tokens_are_prompt else None
        if title is not None:
            print(f"> {title}", flush=True)
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        held = "" if self._is_stopped else self._held + text
        ends = [held.find(stop) for stop in self._stop_strings if stop in held]
        if ends:
            held, self._is_stopped = held[: min(ends)], True
        is_sure = stream_end or self._is_stopped
        room = 0 if is_sure else max(map(len, self._stop_strings), default=1) - 1
        ready, self._held = held[: len(held) - room], held[len(held) - room :]
        print(ready, flush=True, end="\n" if stream_end else "")
        if stream_end:
            self._held, self._is_stopped = "", False
