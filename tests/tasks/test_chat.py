"""Conversations and prompts for causal_lm: what is trained on, dropped and packed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.data.batch import describe_batch
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.log import warn_once
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.text.packed_attention import apply_packed_attention, get_inputs

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

TASK = get_task("causal_lm")
EXAMPLE = Path(__file__).parents[2] / "examples" / "chat.sh"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Marks that stop before the end of the turn, as many do.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The last answer begins with an empty thought, the earlier ones do not (as Qwen3 has it).
THINKING = CHATML.replace(
    "m.role + '\\n' + m.content",
    "m.role + '\\n' + ('<t></t>' if loop.last and m.role == 'assistant' else '') + m.content",
)
# What ends the conversation follows the last answer only.
CLOSED = CHATML.replace(
    "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{{ eos_token }}{% else %}"
)
# Only the last answer has an end.
OPEN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% if loop.last and m.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# The system message moves to the last turn of the user (as Mistral has it).
MOVING = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}[Q]{% if loop.index >= messages | length - 2 %}"
    "{{ messages[0].content }}{% endif %}{{ m.content }}[/Q]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is the sky ?"},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "and the sea ?"},
    {"role": "assistant", "content": " green\nor grey"},
]
SHARE = [
    {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
    for m in TURNS
]


def build_tokenizer() -> Any:
    """Bytes and a few merges, as GPT-2's: spaces belong to the word after them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        ["what is the sky ? blue", "and the sea ? green or grey", "user assistant system"] * 5,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[0], model_max_length=128
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("chatty")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=128,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without a chat template."""
    path = tmp_path_factory.mktemp("plain")
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the library has said."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("rapidformer"), Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel("INFO")
    yield lines
    logger.removeHandler(collector)
    logger.setLevel(level)


def prepare(folder: Path, rows: list[Any], split: str = "train", **values: Any) -> Any:
    return TASK.prepare(make_args(pretrained_model_name_or_path=folder, **values), {split: rows})


def read_trained(prepared: Any, index: int = 0) -> str:
    row = prepared.train[index]
    assert [
        a for a, b in zip(row["labels"], row["input_ids"], strict=True) if a not in (b, -100)
    ] == []
    return prepared.processor.decode([label for label in row["labels"] if label != -100])


@pytest.mark.parametrize("template", [None, MARKED, THINKING])
def test_only_answers_and_their_ends_are_trained_on(template: str | None, folder: Path) -> None:
    prepared = prepare(folder, [{"messages": TURNS}], chat_template=template)
    thought = "<t></t>" if template == THINKING else ""
    assert read_trained(prepared) == f"blue<|im_end|>{thought} green\nor grey<|im_end|>"
    assert sorted(prepared.train[0]) == ["input_ids", "labels"]
    text = prepared.processor.decode(prepared.train[0]["input_ids"])
    assert text == prepared.processor.apply_chat_template(TURNS, tokenize=False)


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (CLOSED, "blue<|im_end|> green\nor grey<|im_end|>"),
        (OPEN, " blue  green\nor grey<|endoftext|>"),
    ],
)
def test_an_earlier_answer_may_end_differently_from_the_last(
    template: str, trained: str, folder: Path
) -> None:
    prepared = prepare(folder, [{"messages": TURNS}], chat_template=template)
    assert read_trained(prepared) == trained


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_an_answer_may_contain_the_end_of_turn(template: str, folder: Path) -> None:
    turns = [*TURNS[1:2], {"role": "assistant", "content": "<|im_end|> ends"}, *TURNS[1:3]]
    prepared = prepare(folder, [{"messages": turns}], chat_template=template)
    assert read_trained(prepared).replace("<t></t>", "") == (
        "<|im_end|> ends<|im_end|>blue<|im_end|>"
    )


def test_a_call_or_answer_that_the_template_leaves_out_is_not_learnt_as_silence(
    folder: Path, said: list[str]
) -> None:
    calls = [{"type": "function", "function": {"name": "get_colour", "arguments": {"of": "sky"}}}]
    turns = [TURNS[1], {"role": "assistant", "content": "", "tool_calls": calls}]
    lost = "it calls the tool 'get_colour', which the chat template leaves out"
    for template in (CHATML, MARKED):
        with pytest.raises(DataError, match=lost):
            prepare(folder, [{"messages": turns}], chat_template=template)
    kept = prepare(folder, [{"messages": turns}, {"messages": TURNS}], chat_template=CHATML)
    assert len(kept.train) == 1 and any(f"dropped 1 of 2 examples: {lost}" in line for line in said)
    silent = CHATML.replace("m.content", "('' if 'hidden' in m.content else m.content)")
    with pytest.raises(DataError, match="has an answer of which the chat template shows nothing"):
        turns = [TURNS[1], {"role": "assistant", "content": "hidden"}]
        prepare(folder, [{"messages": turns}], chat_template=silent)


def test_rows_beyond_the_positions_of_a_rotary_model_are_said(said: list[str]) -> None:
    from transformers import LlamaConfig

    from rapidformer.tasks.text.text import get_max_length

    config, tokenizer = LlamaConfig(max_position_embeddings=64), build_tokenizer()
    assert get_max_length(make_args(seq_length=64), tokenizer, config) == 64
    assert not said
    assert get_max_length(make_args(seq_length=4096), tokenizer, config) == 4096
    assert said[0].startswith("--seq-length 4096 is beyond the 64 positions that the model was")


def test_an_empty_answer_between_others_is_not_trained_on(folder: Path) -> None:
    turns = [*TURNS[:2], {"role": "assistant", "content": ""}, *TURNS[3:]]
    for template in (CHATML, MARKED):
        prepared = prepare(folder, [{"messages": turns}], chat_template=template)
        assert read_trained(prepared) == " green\nor grey<|im_end|>"


def test_generation_stops_at_the_first_special_token_after_an_answer(folder: Path) -> None:
    for template in (CHATML, CLOSED, CHATML.replace("<|im_end|>", " <|im_end|>")):
        prepared = prepare(folder, [{"messages": TURNS}], chat_template=template)
        assert prepared.extras["stop_id"] == prepared.processor.encode("<|im_end|>")[0]


def test_a_token_that_begins_before_the_answer_is_trained_on(folder: Path) -> None:
    joined = (
        "{% for m in messages %}{{ m.content + (' the s' if m.role == 'user' else eos_token) }}"
        "{% endfor %}"
    )
    turns = [{"role": "user", "content": "what is"}, {"role": "assistant", "content": "ky ?"}]
    prepared = prepare(folder, [{"messages": turns}], chat_template=joined)
    assert read_trained(prepared) == " sky ?<|endoftext|>"


def test_all_the_ways_to_write_a_conversation_are_one(folder: Path) -> None:
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TURNS]
    # What a table on disk makes of keys that only some messages have.
    filled = [{**m, "tool_calls": None, "name": None} for m in TURNS]
    wanted = prepare(folder, [{"messages": TURNS}]).train[0]
    unanswered = [*TURNS, {"role": "user", "content": "thanks"}]
    for column, value in (
        ("conversations", SHARE), ("messages", json.dumps(TURNS)), ("messages", parts),
        ("messages", filled), ("messages", unanswered),
    ):  # fmt: skip
        assert prepare(folder, [{column: value}]).train[0] == wanted
    named = prepare(folder, [{"mine": TURNS, "text": "x"}], messages_column="mine")
    assert named.train[0] == wanted


def test_prompts_with_answers_go_through_the_template(folder: Path) -> None:
    wanted = prepare(folder, [{"messages": TURNS[:3]}]).train[0]
    row = {"system_prompt": "be brief", "question": "what is", "context": "", "response": "blue"}
    assert prepare(folder, [{**row, "question": "what is the sky ?"}]).train[0] == wanted
    alpaca = {"instruction": "what is", "input": "the sky ?", "output": "blue"}
    prepared = prepare(folder, [alpaca])
    text = prepared.processor.decode(prepared.train[0]["input_ids"])
    assert "<|im_start|>user\nwhat is\n\nthe sky ?<|im_end|>" in text
    assert read_trained(prepared) == "blue<|im_end|>"


@pytest.mark.parametrize("has_template", [False, True])
def test_without_a_template_prompt_and_answer_are_tokenized_apart(
    has_template: bool, folder: Path, plain_folder: Path
) -> None:
    values = {"chat_template": "none"} if has_template else {}
    prepared = prepare(
        folder if has_template else plain_folder,
        [{"prompt": "what is the s", "completion": "ky ?"}],
        **values,
    )
    tokenizer = prepared.processor
    first, second = tokenizer("what is the s")["input_ids"], tokenizer("ky ?")["input_ids"]
    assert first + second != tokenizer("what is the sky ?")["input_ids"]
    row = prepared.train[0]
    assert row["input_ids"] == [*first, *second, 0]
    assert row["labels"] == [-100] * len(first) + [*second, 0]
    whole = prepare(plain_folder, [{"prompt": "a", "response": "b"}], train_on_prompts=True).train[
        0
    ]
    assert whole["labels"] == [-100, *whole["input_ids"][1:]]


def test_answers_without_an_end_are_reported(
    plain_folder: Path, tmp_path: Path, said: list[str]
) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "m")
    row = prepare(tmp_path / "m", [{"prompt": "what", "response": "blue"}]).train[0]
    assert row["labels"][-1] == tokenizer.encode("blue")[-1]
    assert any("the tokenizer has no end-of-text token: the model will not" in s for s in said)


def test_a_template_without_an_end_is_reported_in_training_alone(
    folder: Path, said: list[str]
) -> None:
    warn_once.cache_clear()
    values = {"chat_template": CHATML.replace("<|im_end|>", "")}
    args = make_args(pretrained_model_name_or_path=folder, **values)
    TASK.prepare_for_prediction(args, [{"messages": TURNS[:-1]}])
    assert not any("nothing after an answer" in line for line in said)
    prepare(folder, [{"messages": TURNS}], **values)
    assert any("nothing after an answer: the model will not learn" in line for line in said)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "within",
        ),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "maximum recursion depth"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[9].content.x.y }}", "has no element 9"),
    ],
    ids=["endless", "recursive", "arithmetic", "missing"],
)
def test_a_template_that_does_not_end_or_fails_is_refused(
    template: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rapidformer.tasks.chat.template._SECONDS", 0.2)
    with pytest.raises(ModelError, match=f"the chat template cannot be used: .*{reason}"):
        prepare(folder, [{"messages": TURNS}], chat_template=template)


def test_a_tokenizer_without_template_gets_one_from_its_own_tokens(
    plain_folder: Path, tmp_path: Path, said: list[str]
) -> None:
    prepared = prepare(plain_folder, [{"messages": TURNS}])
    assert read_trained(prepared) == "blue<|im_end|> green\nor grey<|im_end|>"
    assert sum("the tokenizer has no chat template" in line for line in said) == 1
    tokenizer = build_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    size = len(tokenizer)
    for entry in backend["added_tokens"][1:]:
        backend["model"]["vocab"][entry["content"].replace("|", "")] = entry["id"]
        del backend["model"]["vocab"][entry["content"]]
    backend["added_tokens"] = backend["added_tokens"][:1]
    shutil.copytree(plain_folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(backend))
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    prepared = prepare(tmp_path / "m", [{"messages": TURNS}])
    assert len(prepared.processor) == size
    assert read_trained(prepared) == "blue<|endoftext|> green\nor grey<|endoftext|>"
    text = prepared.processor.decode(prepared.train[0]["input_ids"])
    assert text.startswith("<|system|>\nbe brief<|endoftext|>\n<|user|>\nwhat is")


def test_labels_that_cannot_teach_to_answer_or_to_stop_are_reported(
    folder: Path, plain_folder: Path, said: list[str]
) -> None:
    rows = [{"messages": TURNS}]
    prepare(folder, rows)
    assert not any("trained on," in line for line in said)
    marked = CHATML.replace("{{ '<|im_start|>' + ", "{% generation %}{{ '<|im_start|>' + ", 1)
    marked = marked.replace("'<|im_end|>\\n' }}", "'<|im_end|>\\n' }}{% endgeneration %}", 1)
    prepare(folder, rows, chat_template=marked)
    assert any("train: every token is trained on, the prompts too" in line for line in said)
    said.clear()
    prepare(folder, rows, chat_template=marked, train_on_prompts=True)
    assert not any("every token is trained on" in line for line in said)
    long = [{"messages": [TURNS[1], {"role": "assistant", "content": "blue " * 40}]}]
    prepare(folder, long, seq_length=32)
    stop = "the token that ends an answer, '<|im_end|>', is never trained on, so the model will not"
    assert any(stop in line and "use a longer --seq-length" in line for line in said)
    said.clear()
    prepare(plain_folder, [{"prompt": "what", "response": "blue " * 40}], seq_length=16)
    assert any("the token that ends an answer, '<|endoftext|>', is never" in line for line in said)


def test_a_given_template_wins_and_is_saved(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    prepared = prepare(folder, [{"messages": TURNS}], chat_template=str(file))
    # A template that does not let the assistant begin: its name is part of the answer.
    assert read_trained(prepared).startswith("assistant: blue<|endoftext|>assistant: ")
    prepared.processor.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == file.read_text()
    with pytest.raises(
        ConfigurationError, match=r"--chat-template nowhere.jinja: this is neither a file"
    ):
        prepare(folder, [{"messages": TURNS}], chat_template="nowhere.jinja")
    with pytest.raises(ConfigurationError, match=r"--chat-template none works only for prompts"):
        prepare(folder, [{"messages": TURNS}], chat_template="none")
    with pytest.raises(ModelError, match=r"omits the assistant's answers"):
        prepare(folder, [{"messages": TURNS}], chat_template="{{ bos_token }}")


def test_a_template_that_rewrites_what_came_before_is_refused(folder: Path) -> None:
    rows = [{"messages": TURNS}]
    with pytest.raises(
        ModelError,
        match=r"train, row 1: the chat template renders the beginning of a conversation.*gener",
    ):
        prepare(folder, rows, chat_template=MOVING)
    whole = prepare(folder, rows, chat_template=MOVING, train_on_prompts=True)
    assert read_trained(whole).endswith("be briefand the sea ?[/Q] green\nor grey<|endoftext|>")


def test_what_is_too_long_is_cut_or_dropped_and_reported(folder: Path, said: list[str]) -> None:
    rows = [
        {"prompt": "what is the sky ? " * 9, "response": "blue"},
        {"prompt": "what", "response": "blue " * 40},
        {"prompt": "what", "response": " "},
        {"prompt": "what", "response": "blue"},
        {"prompt": "what", "response": None},
    ]
    prepared = prepare(folder, rows, seq_length=32)
    assert len(prepared.train) == 2
    assert len(prepared.train[0]["input_ids"]) == 32
    assert prepared.train[0]["labels"][-1] != -100
    told = "\n".join(said)
    assert "dropped 1 of 5 examples: no part of the answer fits within --seq-length (row 1)" in told
    assert "dropped 2 of 5 examples: no answer, or an empty one (rows 3, 5)" in told
    assert "1 of 2 examples are longer than 32 tokens and were cut" in told
    trained = sum(label != -100 for row in prepared.train for label in row["labels"])
    tokens = sum(len(row["input_ids"]) for row in prepared.train)
    assert (
        f"{tokens} tokens, of which {100 * trained / tokens:.1f}% are trained on (the answers)"
        in told
    )
    assert "2 prompts with answers (chat template, answers end in '<|im_end|>')" in told
    with pytest.raises(DataError, match=r"train: there is nothing to train on: no part of"):
        prepare(folder, rows[:1], seq_length=32)


def test_what_the_template_refuses_is_dropped_and_reported(folder: Path, said: list[str]) -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    rows = [{"messages": TURNS}, {"messages": TURNS[1:]}]
    assert len(prepare(folder, rows, chat_template=strict + CHATML).train) == 1
    refused = "dropped 1 of 2 examples: it is refused by the chat template: no system here (row 1)"
    assert any(refused in line for line in said)


def test_bad_rows_are_named(folder: Path) -> None:
    good = {"messages": TURNS}
    with pytest.raises(
        DataError,
        match=r"train, rows 2, 4: the column messages has a message with the unknown role 'judge'.*"
        r"train, row 3: the column messages must hold a list of messages, not nothing",
    ):
        bad = {"messages": [{"role": "judge", "content": "x"}]}
        prepare(folder, [good, bad, {"messages": None}, bad])
    for value, told in (
        ([{"content": "x"}], r"without a role \(its keys: content\)"),
        (["x"], r"has a str instead of a message"),
        ([{"role": "user", "content": 7}], r"whose content is not text"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            r"row 2: .* a part of type image, and this task reads text alone: --task image_text",
        ),
        ("hello", r"must hold a list of messages, not a plain string"),
    ):
        with pytest.raises(DataError, match=told):
            prepare(folder, [good, {"messages": value}])
    with pytest.raises(
        DataError, match=r"train, row 1: the column prompt must hold text, not a list"
    ):
        prepare(folder, [{"prompt": ["x"], "response": "y"}])
    with pytest.raises(
        DataError, match=r"validation has no column response, only .*: all splits need"
    ):
        TASK.prepare(
            make_args(pretrained_model_name_or_path=folder),
            {"train": [{"prompt": "a", "response": "b"}], "validation": [{"prompt": "a"}]},
        )


def test_the_kind_of_data_is_chosen_by_its_columns(folder: Path, said: list[str]) -> None:
    row = {"instruction": "what", "output": "blue", "text": "what is the sky ?"}
    as_text = prepare(folder, [row])
    assert "labels" not in as_text.train[0]
    assert any("--prompt-column instruction --response-column output to train" in s for s in said)
    named = prepare(folder, [row], prompt_column="instruction")
    assert read_trained(named) == "blue<|im_end|>"
    with pytest.raises(
        ConfigurationError, match=r"--messages-column a and --text-column text cannot"
    ):
        prepare(folder, [row], messages_column="a", text_column="text")
    with pytest.raises(DataError, match=r"--prompt-column instrucion: .* Did you mean"):
        prepare(folder, [row], prompt_column="instrucion")
    with pytest.raises(DataError, match=r"--text-column .*For conversations, give --messages"):
        prepare(folder, [{"body": "x"}])
    capital = prepare(folder, [{"Question": "what", "Answer": "blue"}])
    assert read_trained(capital) == "blue<|im_end|>"
    # A column of that name that holds no turns is none.
    assert "labels" not in prepare(folder, [{"chat": "hello", "text": "what is"}]).train[0]


def test_tools_of_a_conversation_reach_the_template(folder: Path) -> None:
    schema = {"type": "function", "function": {"name": "look", "parameters": None}}
    template = "{% for tool in tools or [] %}the {{ tool.function | tojson }}{% endfor %}" + CHATML
    shown, *same = (
        prepare(folder, [{"messages": TURNS, name: tools}], chat_template=template, **given)
        for name, tools, given in (
            ("tools", [schema], {}),
            ("tools", json.dumps([schema]), {}),
            ("tools", [json.dumps(schema)], {}),
            ("functions", [schema], {"tools_column": "functions"}),
        )
    )
    expected = shown.processor.apply_chat_template(
        TURNS, tools=[{"type": "function", "function": {"name": "look"}}], tokenize=False
    )
    assert shown.processor.decode(shown.train[0]["input_ids"]) == expected
    assert expected.startswith('the {"name": "look"}') and "green" in read_trained(shown)
    assert all(each.train[0] == shown.train[0] for each in same)
    plain = prepare(folder, [{"messages": TURNS, "tools": []}], chat_template=template)
    assert len(plain.train[0]["input_ids"]) < len(shown.train[0]["input_ids"])
    args = make_args(pretrained_model_name_or_path=folder, chat_template=template, max_new_tokens=4)
    asked = TASK.prepare_for_prediction(args, [{"messages": TURNS, "tools": [schema]}])
    assert shown.processor.decode(asked.test[0]["input_ids"]).startswith('the {"name": "look"}')
    with pytest.raises(DataError, match=r"train, row 1: the column tools must hold a list of JSON"):
        prepare(folder, [{"messages": TURNS, "tools": "look"}])


def test_variables_of_the_template(folder: Path) -> None:
    template = "{% if is_brief %}be brief{% endif %}" + CHATML
    rows = [{"messages": TURNS[1:]}]
    given = {"chat_template": template, "chat_template_kwargs": '{"is_brief": true}'}
    prepared = prepare(folder, rows, **given)
    assert prepared.processor.decode(prepared.train[0]["input_ids"]).startswith("be brief")
    args = make_args(pretrained_model_name_or_path=folder, max_new_tokens=4, **given)
    asked = TASK.prepare_for_prediction(args, rows)
    assert prepared.processor.decode(asked.test[0]["input_ids"]).startswith("be brief")


def test_a_test_split_may_have_no_answers(folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=folder)
    rows = [{"prompt": "what", "response": "blue"}]
    for test in ([{"prompt": "what"}], [{"prompt": "what", "response": ""}]):
        prepared = TASK.prepare(args, {"train": rows, "test": test})
        assert prepared.test is None and not prepared.is_labelled("test")
    long = [{"prompt": "what is the sky ? " * 40, "response": "blue"}]
    with pytest.raises(DataError, match=r"test: there is nothing to train on: no part of"):
        TASK.prepare(args, {"train": rows, "test": long})


# ---- prediction --------------------------------------------------------------------------------


def test_predict_answers_conversations_and_prompts_and_continues_texts(folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=folder, max_new_tokens=4)
    tokenizer = prepare(folder, [{"messages": TURNS}]).processor
    asked = tokenizer.apply_chat_template(TURNS[:-1], add_generation_prompt=True)["input_ids"]
    ready = TASK.prepare_for_prediction(args, [{"messages": TURNS}, {"messages": TURNS[:-1]}])
    assert [row["input_ids"] for row in ready.test] == [asked, asked]
    model = TASK.build_model(args, ready)
    assert model.generation_config.eos_token_id == [
        0,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    found = TASK.predictions(run_split(TASK, model, ready, "test"), ready, "test")
    assert found[0]["messages"] == found[1]["messages"] == TURNS[:-1]
    assert found[0]["expected"] == " green\nor grey" and "expected" not in found[1]
    assert found[0]["generated"] == found[1]["generated"]

    ready = TASK.prepare_for_prediction(args, [{"prompt": "what is the sky ?"}])
    text = tokenizer.decode(ready.test[0]["input_ids"])
    assert text == "<|im_start|>user\nwhat is the sky ?<|im_end|>\n<|im_start|>assistant\n"
    row = TASK.predictions(run_split(TASK, model, ready, "test"), ready, "test")[0]
    assert list(row) == ["prompt", "generated"]
    named = make_args(pretrained_model_name_or_path=folder, prompt_column="q", max_new_tokens=4)
    ready = TASK.prepare_for_prediction(named, ["what is the sky ?"])
    assert tokenizer.decode(ready.test[0]["input_ids"]) == text

    ready = TASK.prepare_for_prediction(args, ["what is the sky ?"])
    assert tokenizer.decode(ready.test[0]["input_ids"]) == text, "a chat model answers"
    bare = make_args(pretrained_model_name_or_path=folder, chat_template="none", max_new_tokens=4)
    for given, how in ((["what is"], bare), ([{"text": "what is"}], args)):
        ready = TASK.prepare_for_prediction(how, given)
        assert tokenizer.decode(ready.test[0]["input_ids"]) == "what is"
    row = TASK.predictions(run_split(TASK, model, ready, "test"), ready, "test")[0]
    assert list(row) == ["text", "generated"]


def test_predict_without_a_template_asks_as_training_did(
    plain_folder: Path, said: list[str]
) -> None:
    args = make_args(pretrained_model_name_or_path=plain_folder, max_new_tokens=4, seq_length=12)
    rows = [{"instruction": "what is", "input": "the sky ?", "output": "blue"}]
    trained = prepare(plain_folder, rows).train[0]
    ready = TASK.prepare_for_prediction(args, rows)
    asked = trained["labels"].count(-100)
    assert ready.test[0]["input_ids"] == trained["input_ids"][:asked][-8:]
    assert ready.extras["expected"] == ["blue"]
    assert ready.extras["shown"] == [{"instruction": "what is", "input": "the sky ?"}]
    TASK.prepare_for_prediction(args, [{"prompt": "what is the sky ? " * 4}])
    assert any("input, row 1: longer than 8 tokens, which leaves no room" in s for s in said)


# ---- packing -----------------------------------------------------------------------------------

PAIRS = [
    {"prompt": "what is the sky ? " * (n % 3), "response": "blue or green " * (1 + n % 4)}
    for n in range(12)
]


def build_llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def build_gpt2(attention: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel._from_config(config, attn_implementation=attention)


def measure(model: Any, prepared: Any) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients and what the loader says that the loss is a mean over."""
    model.zero_grad()
    batch = prepared.collate([prepared.train[i] for i in range(len(prepared.train))])
    loss = TASK.forward(model, batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return float(loss.detach()), gradients, describe_batch(batch).shifted_labels


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [build_gpt2, build_llama])
@pytest.mark.parametrize("whole", [False, True])
def test_packed_and_unpacked_have_one_loss_and_one_gradient(
    build: Callable[[str], Any], attention: str, whole: bool, folder: Path
) -> None:
    torch.manual_seed(0)
    model = build(attention)
    values = {"seq_length": 64, "train_on_prompts": whole}
    unpacked = prepare(folder, PAIRS, **values)
    packed = prepare(folder, PAIRS, packing=True, **values)
    assert len(packed.train) < len(unpacked.train) == 12
    assert max(len(row["input_ids"]) for row in packed.train) <= 64
    apply_packed_attention(model, 64)
    model.train()
    loss, gradients, count = measure(model, unpacked)
    packed_loss, packed_gradients, packed_count = measure(model, packed)
    assert packed_count == count
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            packed_gradients[name],
            gradient,
            rtol=1e-6,
            atol=1e-6 * scale,
            msg=lambda m, n=name: n + m,
        )


def test_evaluation_is_the_same_packed(folder: Path, said: list[str]) -> None:
    values = {"pretrained_model_name_or_path": folder, "seq_length": 64}
    splits = {"train": PAIRS, "validation": PAIRS[:7]}
    args = make_args(packing=True, **values)
    packed = TASK.prepare(args, splits)
    model = TASK.build_model(args, packed)
    losses = train_steps(TASK, model, packed, steps=5)
    assert losses[-1] < losses[0]
    results = []
    for prepared in (packed, TASK.prepare(make_args(**values), splits)):
        records = run_split(TASK, model, prepared, "validation", batch_size=2)
        results.append(compute_metrics(TASK, records, prepared, "validation"))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert set(results[0]) == {"loss", "perplexity", "accuracy"}
    told = "\n".join(said)
    assert f"train: 12 examples in {len(packed.train)} rows, " in told
    assert "GPT2LMHeadModel keeps examples apart by positions" in told


def test_plain_text_is_packed_with_each_text_as_an_example(folder: Path) -> None:
    rows = [{"text": "what is the sky ? " * n} for n in (1, 2, 3, 1)]
    prepared = prepare(folder, rows, packing=True, group_texts=False, seq_length=32)
    apart = prepare(folder, rows, group_texts=False, seq_length=32)
    joined = [token for row in prepared.train for token in row["input_ids"]]
    assert sorted(joined) == sorted(t for row in apart.train for t in row["input_ids"])
    first = prepared.train[0]
    starts = [n for n, position in enumerate(first["position_ids"]) if position == 0]
    assert len(starts) > 1
    assert [n for n, label in enumerate(first["labels"]) if label == -100] == starts


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

GROUPED = {"intermediate_size": 24, "num_key_value_heads": 2}


def build_small(family: str, **values: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **values}))


@pytest.mark.parametrize(
    ("family", "values", "way"),
    [
        ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 16}, "a mask"),
        ("mistral", {**GROUPED, "sliding_window": 6}, "positions"),
        (
            "gpt_oss",
            {**GROUPED, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
             "sliding_window": 6},
            "a mask for each kind of layer",
        ),
    ],
)  # fmt: skip
def test_each_family_is_packed_in_the_way_that_is_right_for_it(
    family: str, values: dict[str, Any], way: str
) -> None:
    model = build_small(family, **values)
    apply_packed_attention(model, 64)
    assert model.packed_attention == way
    model.eval()
    dice = torch.Generator().manual_seed(1)
    examples = [torch.randint(3, 64, (size,), generator=dice) for size in (9, 11, 8)]
    positions = torch.cat([torch.arange(len(e)) for e in examples])
    batch = {"input_ids": torch.cat(examples)[None], "position_ids": positions[None]}
    mask = {"attention_mask": torch.ones_like(batch["input_ids"])}
    with torch.no_grad():
        packed = model(**get_inputs(model, {**batch, **mask})).logits[0]
        alone = torch.cat([model(input_ids=e[None]).logits[0] for e in examples])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


def test_the_round_off_of_a_deep_mixture_of_experts_is_not_a_leak() -> None:
    """Other tokens in one example go to other experts, which changes the round-off of the rest."""
    model = build_small("mixtral", **GROUPED, num_hidden_layers=16, initializer_range=0.5)
    apply_packed_attention(model, 64)
    assert model.packed_attention == "positions"


def test_a_model_that_lets_examples_read_each_other_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"BloomForCausalLM does not keep the examples of a packed"
    ):
        apply_packed_attention(build_small("bloom"), 64)
    # Attention is kept apart here, but the recurrent layers carry a little over.
    jamba = build_small(
        "jamba", **GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4,
    )  # fmt: skip
    with pytest.raises(
        ModelError, match=r"the effect of an example on those after it: by positions"
    ):
        apply_packed_attention(jamba, 64)
    # A window that our own mask would have to imitate, too long to be tried.
    wide = build_small("opt", ffn_dim=24, word_embed_proj_dim=16)
    wide.config.sliding_window = 300
    with pytest.raises(ModelError, match=r"by a mask: not possible"):
        apply_packed_attention(wide, 1000)
    silent = build_gpt2("eager")
    for block in silent.transformer.h:
        torch.nn.init.zeros_(block.attn.c_proj.weight)
    with pytest.raises(ModelError, match=r"hardly depend on earlier tokens"):
        apply_packed_attention(silent, 64)


@pytest.mark.usefixtures("as_the_processor_can")
def test_the_example_trains_on_packed_conversations_that_predict_answers(
    command: Any, folder: Path, tmp_path: Path
) -> None:
    rows = [{"messages": TURNS[: 3 + 2 * (n % 2)]} for n in range(16)]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    write_jsonl(tmp_path / "data" / "validation.jsonl", rows[:4])
    # The script's words, run in this process: no seconds of importing.
    words = subprocess.run(
        ["bash", "-c", 'rapidformer() { printf "%s\\n" "$@"; }; source "$0" "$@"', str(EXAMPLE),
         "--seq-length", "128", "--save", str(tmp_path / "run"), "--log-interval", "1",
         "--device", "cpu"],
        env={**os.environ, "MODEL": str(folder), "DATA": str(tmp_path / "data")},
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert "chat      train: 16 conversations (chat template, answers end in" in done.stderr
    assert "packing   train: 16 examples in " in done.stderr
    assert "attention_mask" not in done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "eval_perplexity" in line][-1]["eval_perplexity"] > 1
    done = command(
        "predict", "--task", "causal_lm", "--load", tmp_path / "run", "--max-new-tokens", 3,
        "--input", json.dumps({"messages": TURNS}), "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["expected"] == " green\nor grey"


def test_packing_that_pads_more_than_no_packing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from rapidformer.tasks.causal_lm import _pack

    def pack(lengths: list[int]) -> str:
        caplog.clear()
        logger = logging.getLogger("rapidformer")
        logger.addHandler(caplog.handler)
        try:
            _pack([{"input_ids": [0] * n, "length": n} for n in lengths], "train", 10)
        finally:
            logger.removeHandler(caplog.handler)
        return caplog.text

    assert "--packing adds padding to train" not in pack([2, 8, 5, 5])
    # Nothing but the last row is padded, and longer rows would be padded more.
    assert "--packing adds padding to train" not in pack([5, 5, 5])
    # 6 and 4 fill a row of ten, and the other sixes are padded to ten.
    said = pack([6, 6, 6, 4])
    assert "--packing adds padding to train" in said
    assert "a --seq-length of at least 12" in said
