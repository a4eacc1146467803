"""``rapidformer data show``: rows as the model sees them, and which tokens are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.small import make_tokenizer
from tests.tasks.published_templates import PUBLISHED, build_tokenizer

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is\nthe sky ?"},
    {"role": "assistant", "content": "blue é 蓝 [or] green"},
]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_model(folder: Path, tokenizer: Any, family: str, **sizes: Any) -> Path:
    """A tokenizer and a configuration: rows are shown without any weights."""
    tokenizer.save_pretrained(folder)
    AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    return folder


@pytest.fixture
def chat_words(tmp_path: Path) -> list[Any]:
    folder = make_model(tmp_path / "model", build_tokenizer(PUBLISHED["qwen3"]), "gpt2")
    data = write_rows(tmp_path / "chats.jsonl", [{"messages": TURNS}] * 3)
    return [
        "data", "show", "--task", "causal_lm", "--pretrained-model-name-or-path", folder,
        "--data-path", data, "-n", 1,
    ]  # fmt: skip


def test_without_a_terminal_what_is_trained_on_is_in_brackets(
    command: Any, chat_words: list[Any]
) -> None:
    done = command(*chat_words, "--device", "cuda")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("--- train, row 1 of 3: ")
    assert done.stdout.splitlines()[1:] == [
        "<|im_start|>system↵",
        "be brief<|im_end|>↵",
        "<|im_start|>user↵",
        "what is↵",
        "the sky ?<|im_end|>↵",
        "<|im_start|>assistant↵",
        "<think>↵",
        "↵",
        "</think>↵",
        "↵",
        "⟦blue é 蓝 [or] green<|im_end|>⟧↵",
        "",
        "⟦...⟧ trained on (all else is only read)",
    ]
    assert "chat      train: 3 conversations (chat template, answers end in" in done.stderr


def test_in_a_terminal_what_is_trained_on_is_coloured(
    command: Any, chat_words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = command(*chat_words).stdout
    assert "\x1b[30;42m green\x1b[0m" in shown and "\x1b[1;30;42m<|im_end|>\x1b[0m" in shown
    assert "\x1b[1m<|im_start|>\x1b[0msystem" in shown and "⟦" not in shown


def test_a_table_has_the_id_of_every_token(command: Any, chat_words: list[Any]) -> None:
    shown = command(*chat_words, "--table", "--tokens", 2).stdout.splitlines()
    tokenizer = build_tokenizer(PUBLISHED["qwen3"])
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert shown[1].split() == ["0", str(start), "'<|im_start|>'"]
    assert shown[3].endswith(" more tokens")
    lines = command(*chat_words, "--table").stdout.splitlines()
    assert "⟦" not in lines[-1], "a table has no brackets to explain"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert lines[-2].split()[1:] == [str(end), "'<|im_end|>'", "trained"]


def test_packed_examples_are_kept_apart(command: Any, chat_words: list[Any]) -> None:
    shown = command(*chat_words, "--packing", "--seq-length", 200).stdout
    assert shown.count("--- next example of the row\n<|im_start|>system") == 2
    assert shown.count("⟦blue é 蓝 [or] green<|im_end|>⟧") == 3


def test_problems_are_reported_together(command: Any, chat_words: list[Any]) -> None:
    words = ["-n" if word == 1 else word for word in chat_words[:-1]]
    done = command(*words, 0, "--split", "valid", "--tokens", -1, "--text-column", "nothing")
    assert done.returncode == 1
    for part in (
        "-n 0: must be",
        "--split valid: use train",
        "--tokens -1",
        "--text-column nothing",
    ):
        assert part in done.stderr
    done = command(*chat_words, "--split", "test")
    assert "the data has no split 'test' with labels" in done.stderr
    done = command("data", "show", "--task", "pretraining")
    assert "reads .bin/.idx files: use `rapidformer data head`" in done.stderr


SMALL_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("sequence_classification", {"text": "w1 w2", "label": "good"}, ["label: good (0)"]),
        (
            "token_classification",
            {"tokens": ["w1", "w2"], "ner_tags": ["B-PER", "O"]},
            ["⟦ w1<B-PER> w2<O>⟧[SEP]"],
        ),
        (
            "question_answering",
            {"question": "w1", "context": "w2 w3 w4", "answers": "w3"},
            ["w2⟦ w3⟧ w4[SEP]", "answer: 'w3'"],
        ),
        (
            "multiple_choice",
            {"sent1": "w1", "ending0": "w2", "ending1": "w3", "label": 1},
            ["choice 0\n[CLS] w1[SEP] w2[SEP]", "choice 1\n[CLS] w1[SEP] w3[SEP]", "label: 1"],
        ),
        ("masked_lm", {"text": "w1 w2 w3 w4"}, ["⟧", "trained on"]),
    ],
)
def test_every_task_shows_its_labels(
    task: str, row: dict[str, Any], expected: list[str], command: Any, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", make_tokenizer(), "bert", **SMALL_BERT)
    data = write_rows(tmp_path / "train.jsonl", [row] * 2)
    done = command(
        "data", "show", "--task", task, "--pretrained-model-name-or-path", folder,
        "--from-scratch", "--data-path", data, "--doc-stride", 8, "-n", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in expected:
        assert part in done.stdout


def test_source_and_target_are_shown_apart(command: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", make_tokenizer(), "t5", d_model=16)
    data = write_rows(tmp_path / "train.jsonl", [{"source": "w1 w2", "target": "w3"}])
    done = command(
        "data", "show", "--task", "seq2seq_lm", "--pretrained-model-name-or-path", folder,
        "--from-scratch", "--data-path", data,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "source\n[CLS] w1 w2[SEP]\ntarget\n⟦[CLS] w3[SEP]⟧" in done.stdout
