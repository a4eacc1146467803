"""Tasks on a stream: the samples of a table of the same rows; unknown labels are refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import rapidformer.data.streams.stream as streams
from rapidformer.config import Settings
from rapidformer.config.stream_rules import find_length_problems, find_stream_problems
from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import DataError
from rapidformer.tasks.mixture import prepare_data
from rapidformer.tasks.registry import get_task, list_tasks

from .conftest import make_args, write_jsonl

TEXTS = ["the cat sat on the mat .", "a good movie !", "who lives in paris ?", "john runs and eats"]


def make_table(task: str) -> list[dict[str, Any]]:
    """Rows of a task; 7 of them, so that they are not cut like chunks."""
    texts = [f"{TEXTS[n % 4]} {TEXTS[n % 3]}" for n in range(7)]
    turns: list[Any] = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(texts, reversed(texts), strict=True)
    ]
    turns[2] = turns[2][:1]  # without an answer: it is left out
    columns: dict[str, dict[str, list[Any]]] = {
        "sequence_classification": {"text": texts, "label": [*"abcabca"]},
        "token_classification": {
            "tokens": [*map(str.split, texts[:3]), [], *map(str.split, texts[4:])],
            "tags": [["X" if w == "the" else "O" for w in text.split()] for text in texts],
        },
        "causal_lm": {"text": texts}, "masked_lm": {"text": texts},
        "chat": {"messages": turns},
        "seq2seq_lm": {"text": texts, "summary": TEXTS[:1] * 7},
        "multiple_choice": {
            "context": texts, "choices": [["yes", "no"]] * 7, "label": [0, 1, 1, 0, 0, 1, 1],
        },
        "question_answering": {
            "question": ["who ?"] * 7, "context": [" ".join([text] * 4) for text in texts],
            "answers": [text.split()[1] for text in texts],
        },
        "preference": {"prompt": texts, "chosen": ["yes ."] * 7, "rejected": ["no ."] * 7},
        "reward": {"prompt": texts, "chosen": ["yes ."] * 7, "rejected": ["no ."] * 7},
        "embedding": {"anchor": texts, "positive": ["good ."] * 7, "negative": ["bad ."] * 7},
        "reranking": {"query": texts, "document": ["good ."] * 7, "score": [1.0, 0.0] * 3 + [1.0]},
    }  # fmt: skip
    cells = columns[task]
    if task == "token_classification":
        cells["tags"][3] = []
    return [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


CASES: dict[str, dict[str, Any]] = {
    **{name: {"task": name} for name in (
        "sequence_classification", "token_classification", "masked_lm", "causal_lm", "seq2seq_lm",
        "multiple_choice", "question_answering", "preference", "reward", "embedding", "reranking",
    )},
    "chat": {"task": "causal_lm"}, "packing": {"task": "causal_lm", "packing": True},
    "kto": {"task": "preference", "loss": "kto"},
}  # fmt: skip
_FOLDERS = {"seq2seq_lm": "t5_folder"} | dict.fromkeys(
    ("causal_lm", "preference", "reward"), "gpt_folder"
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} ."
    "{% endgeneration %}{% else %}{{ m.content }} ? {% endif %}{% endfor %}"
)


def collect(prepared: Any, num_workers: int = 0) -> list[Any]:
    """The samples of the training split, as the loader hands them out."""
    loader = DistributedLoader(
        prepared.train, collate=lambda rows: {"rows": rows}, micro_batch_size=1,
        num_workers=num_workers,
    )  # fmt: skip
    return [batch.batch["rows"][0] for batch in loader.iterate_micro_batches()]


@pytest.mark.parametrize("case", CASES)
def test_a_stream_has_the_samples_of_a_table(
    case: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = dict(CASES[case])
    rows = make_table({"packing": "chat", "kto": "preference"}.get(case, case))
    write_jsonl(tmp_path / "train.jsonl", rows)
    settings |= {"seq_length": 24, "data_path": tmp_path, "dataloader_type": "single"}
    if case in ("chat", "packing"):
        settings |= {"chat_template": TEMPLATE, "seq_length": 48}
    task = get_task(settings["task"])
    folder = request.getfixturevalue(_FOLDERS.get(task.name, "bert_folder"))
    settings["pretrained_model_name_or_path"] = folder
    table, stream = (task.prepare(make_args(**settings, streaming=s)) for s in (False, True))
    expected = [table.train[number] for number in range(len(table.train))]
    if case == "packing":  # the whole table is one chunk
        assert len(expected) < 6
    assert collect(stream) == expected
    assert stream.model_settings == table.model_settings


def test_pictures_in_a_tar(vit_folder: Path, tmp_path: Path) -> None:
    def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))

    dice = np.random.default_rng(0)
    with tarfile.open(tmp_path / "train-00.tar", "w") as archive:
        for number in range(5):
            file = io.BytesIO()
            pixels = dice.integers(0, 255, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file, "png")
            add(archive, f"{number}.png", file.getvalue() if number < 4 else b"no picture")
            add(archive, f"{number}.cls", str(number % 2).encode())
    args = make_args(
        pretrained_model_name_or_path=vit_folder, data_path=str(tmp_path / "*.tar"),
        streaming=True, dataloader_type="single",
    )  # fmt: skip
    prepared = get_task("image_classification").prepare(args)
    loader = DistributedLoader(prepared.train, collate=list, micro_batch_size=1, num_workers=1)
    batches = iter(loader)
    for number in range(4):
        (row,) = next(batches)
        assert row["pixel_values"].shape == (3, 8, 8) and row["labels"] == number % 2
    with pytest.raises(
        DataError, match=r"train-00\.tar, row 5: 4\.png cannot be read as an image\.$"
    ):
        next(batches)


@pytest.fixture
def short_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_HEAD_ROWS", 4)


@pytest.mark.usefixtures("short_head")
def test_labels(bert_folder: Path, tmp_path: Path) -> None:
    labels: list[Any] = [*"baabac"]
    task = get_task("sequence_classification")

    def prepare(**settings: Any) -> Any:
        rows = [{"text": "a cat", "label": label} for label in labels]
        write_jsonl(tmp_path / "train.jsonl", rows)
        args = make_args(
            **{"pretrained_model_name_or_path": bert_folder, **settings},
            data_path=tmp_path, streaming=True, dataloader_type="single",
        )  # fmt: skip
        return task.prepare(args)

    found = prepare()
    assert found.extras["names"] == ("a", "b")
    with pytest.raises(DataError) as caught:
        collect(found)
    assert str(caught.value) == (
        f"{tmp_path / 'train.jsonl'}, row 6: the label 'c' in the column label is not one of those "
        "in the first rows (a, b): correct it, or name all classes with --label-names."
    )
    named = prepare(label_names=["c", "b", "a"])
    assert named.extras["names"] == ("c", "b", "a")
    assert [row["labels"] for row in collect(named)] == [1, 2, 2, 1, 2, 0]
    # A classifier of all of them: its own classes are kept.
    model = task.build_model(make_args(pretrained_model_name_or_path=bert_folder), named)
    model.save_pretrained(tmp_path / "model")
    named.processor.save_pretrained(tmp_path / "model")
    again = prepare(pretrained_model_name_or_path=tmp_path / "model")
    assert again.extras["names"] == ("c", "b", "a")

    labels[:] = [0, 1, 1, 0, 1, 2]
    with pytest.raises(DataError, match=r"row 6: the label 2 in the column label is not one of"):
        collect(prepare())
    assert [row["labels"] for row in collect(prepare(num_labels=3))] == labels
    labels[:] = [0.5, 1.0, 1.5, 0.0, "x", 1.0]
    with pytest.raises(DataError, match=r"row 5: the column label holds 'x' \(str\), but '0.5'"):
        collect(prepare())


@pytest.mark.usefixtures("short_head")
def test_later_rows_that_a_task_cannot_use(bert_folder: Path, tmp_path: Path) -> None:
    def fail(task: str, rows: list[dict[str, Any]]) -> str:
        path = write_jsonl(tmp_path / task / "train.jsonl", rows)
        args = make_args(
            pretrained_model_name_or_path=bert_folder, data_path=path, streaming=True,
            dataloader_type="single",
        )  # fmt: skip
        with pytest.raises(DataError) as caught:
            collect(get_task(task).prepare(args))
        assert str(caught.value).startswith(f"{path}, row 6: "), caught.value
        return str(caught.value).removeprefix(f"{path}, row 6: ")

    rows = [{"tokens": ["a", "cat"], "tags": ["X", "O"]} for _ in range(6)]
    rows[5] = {"tokens": ["a", "cat"], "tags": ["X"]}
    problem = "2 words in tokens but 1 tags in tags; each word needs one tag."
    assert fail("token_classification", rows) == problem
    texts: list[Any] = [{"text": "the cat", "label": "a"} for _ in range(6)]
    texts[5] = {"label": "a"}
    problem = "the column text must hold text, not nothing."
    assert fail("sequence_classification", texts) == problem
    choices: list[Any] = [{"context": "a", "choices": ["b", "c"], "label": 0} for _ in range(6)]
    choices[5] = {**choices[5], "label": 7}
    assert "the label 7 in the column label is none of the 2" in fail("multiple_choice", choices)


def test_which_tasks_stream() -> None:
    loaded_whole = {"grpo"}
    assert {task.name for task in list_tasks() if not task.streams} == loaded_whole
    for name in loaded_whole:
        with pytest.raises(DataError, match=f"the task {name} prepares all rows at once"):
            prepare_data(get_task(name), make_args(), {"train": iter([])})


@pytest.mark.usefixtures("short_head")
def test_items_of_a_stream_have_room_for_the_texts_of_the_first_rows(
    bert_folder: Path, tmp_path: Path
) -> None:
    rows: list[Any] = [{"anchor": "a", "positive": "b", "negative": ["c"]} for _ in range(6)]
    rows[5]["negative"] = ["c", "d", "e"]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    args = make_args(
        pretrained_model_name_or_path=bert_folder, data_path=path, streaming=True,
        dataloader_type="single",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"row 6: 5 texts .* the stream have at most 3"):
        collect(get_task("embedding").prepare(args))


def test_rules() -> None:
    def find(**settings: Any) -> list[str]:
        args = Settings(**{"task": "causal_lm", "streaming": True, **settings})
        return [*find_stream_problems(args), *find_length_problems(args)]

    assert find(train_iters=5) == []
    assert find(epochs=1, lr_decay_style="constant") == []
    assert find() == [
        "--streaming: the data has no known length: give --train-iters N, or --epochs 1 "
        "--lr-decay-style constant for one pass."
    ]
    assert "--lr-decay-style linear" in find(epochs=2)[0]
    assert "give whole passes" in find(epochs=1.5, lr_decay_style="constant")[0]
    assert (
        "--save-interval 0.5 is a share"
        in find(epochs=1, lr_decay_style="constant", save_interval=0.5)[0]
    )
    for name, value in {
        "group_by_length": True, "max_train_samples": 5, "validation_split": 0.1,
        "task": "pretraining",
    }.items():  # fmt: skip
        (problem,) = find(train_iters=5, **{name: value})
        assert "--streaming" in problem


def test_validation_is_a_table(bert_folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "a cat", "label": label} for label in "abab"]
    write_jsonl(tmp_path / "train.jsonl", rows)
    with tarfile.open(tmp_path / "valid.tar", "w") as archive:
        for number, row in enumerate(rows):
            content = json.dumps(row).encode()
            info = tarfile.TarInfo(f"{number}.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    args = make_args(
        pretrained_model_name_or_path=bert_folder, data_path=tmp_path, streaming=True,
        max_eval_samples=3,
    )  # fmt: skip
    prepared = get_task("sequence_classification").prepare(args)
    assert len(prepared.validation) == 3
    assert not hasattr(prepared.train, "__len__")
