"""The derived mask on published templates: the assistant's words and its ending token, no more."""

from __future__ import annotations

from typing import Any

import pytest

from rapidformer.config import Settings
from rapidformer.log import get_logger, warn_once
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import build_encoder, encode_chats

from .published_templates import PUBLISHED, build_tokenizer

SYSTEM = {"role": "system", "content": "be brief"}
ASKED = [{"role": "user", "content": "what is the sky ?"}, {"role": "user", "content": "and now ?"}]
SAID = ["blue or\ngreen", "grey, the sky"]
NO_SYSTEM_ROLE = {"phi-3 first"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: build_tokenizer(published) for name, published in PUBLISHED.items()}


def converse(*answers: dict[str, Any] | str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for question, answer in zip(ASKED, answers, strict=False):
        said = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        turns += [question, said]
    return turns


def encode(tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, list[int]]:
    columns = ChatColumns(messages="messages")
    encoder = build_encoder(tokenizer, columns, Settings(), 4096)
    kept = encode_chats([{"messages": messages}], "train", encoder, None)
    row: dict[str, list[int]] = kept.features[0]
    return row


def read_runs(tokenizer: Any, row: dict[str, list[int]]) -> list[str]:
    """The text of each run of tokens that are trained on."""
    runs: list[list[int]] = []
    last = False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        if label != -100:
            assert label == token
            runs = runs if last else [*runs, []]
            runs[-1].append(token)
        last = label != -100
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("has_system", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_words_of_the_assistant_and_its_ending_token_are_trained(
    name: str, turns: int, has_system: bool, tokenizers: dict[str, Any]
) -> None:
    tokenizer, published = tokenizers[name], PUBLISHED[name]
    messages = converse(*SAID[:turns])
    messages = [SYSTEM, *messages] if has_system else messages
    row = encode(tokenizer, messages)
    answers = [f"{published.lead}{text}{published.end}" for text in SAID[:turns]]
    assert read_runs(tokenizer, row) == answers
    # The model sees what the template renders, and the answers where the assistant speaks.
    text = tokenizer.decode(row["input_ids"])
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.count(published.before_answer) >= turns
    assert ("be brief" in text) == (has_system and name not in {"mistral", *NO_SYSTEM_ROLE})


def test_mistral_says_that_it_leaves_the_system_message_out(
    tokenizers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    get_logger().addHandler(caplog.handler)
    try:
        encode(tokenizers["mistral"], [SYSTEM, *converse(*SAID)])
    finally:
        get_logger().removeHandler(caplog.handler)
    assert "leaves the system message out of conversations that end with an answer" in caplog.text


@pytest.mark.parametrize("as_content", [False, True])
def test_qwen3_trains_on_a_thought_but_not_on_an_empty_one(
    as_content: bool, tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers["qwen3"]
    thought = {"role": "assistant", "content": "blue", "reasoning_content": "the sky is"}
    if as_content:
        thought = {"role": "assistant", "content": "<think>\nthe sky is\n</think>\n\nblue"}
    shown = "<think>\nthe sky is\n</think>\n\nblue<|im_end|>"
    assert read_runs(tokenizer, encode(tokenizer, converse(thought))) == [shown]
    # The template removes thoughts from earlier turns: only the answer is left to train on.
    later = read_runs(tokenizer, encode(tokenizer, converse(thought, "grey")))
    assert later == ["blue<|im_end|>", "grey<|im_end|>"]
    text = tokenizer.decode(encode(tokenizer, converse("blue"))["input_ids"])
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\nblue<|im_end|>" in text


CALL = {"name": "look", "arguments": {"at": "sky"}}
CALLED = {
    "llama-3.1": '{"name": "look", "parameters": {"at": "sky"}}<|eot_id|>',
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call><|im_end|>',
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sky"}, "id": "abcdefghi"}]</s>',
}


@pytest.mark.parametrize("has_system", [False, True])
@pytest.mark.parametrize("name", list(CALLED))
def test_tool_calls_are_trained_and_their_results_are_not(
    name: str, has_system: bool, tokenizers: dict[str, Any]
) -> None:
    tokenizer, published = tokenizers[name], PUBLISHED[name]
    calls = [{"id": "abcdefghi", "type": "function", "function": CALL}]
    messages = [
        *([SYSTEM] if has_system else []),
        ASKED[0],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "green", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "it is green", "tool_calls": []},
    ]
    row = encode(tokenizer, messages)
    last = f"{published.lead}it is green{published.end}"
    assert read_runs(tokenizer, row) == [CALLED[name], last]
    assert "green" in tokenizer.decode(
        [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]
    )


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_generation_stops_at_the_token_that_was_trained(
    name: str, tokenizers: dict[str, Any]
) -> None:
    published = PUBLISHED[name]
    tokenizer = tokenizers[name]
    encoder = build_encoder(tokenizer, ChatColumns(messages="messages"), Settings(), 4096)
    assert encoder.get_stop_id() == tokenizer.convert_tokens_to_ids(published.end)
