"""Predictions: every row once and in order, the same on any layout, resumed after a kill."""

from __future__ import annotations

import csv
import io
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

import rapidformer
from rapidformer.cli.inputs import name_input_files, read_input
from rapidformer.cli.main import main
from rapidformer.cli.output import PartialPredictions
from rapidformer.cli.run_model import choose_run_model, guess_task
from rapidformer.config import parse_arguments
from rapidformer.engine import RapidformerEngine, predict_rows
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.tasks.evaluation import predicting
from rapidformer.tasks.evaluation.predicting import iterate_predictions, predict_task, show_progress
from tests.processes import PATIENCE, run_in_kept_processes

from .test_chat import CHATML, build_tokenizer

WORDS = ["what", "is", "the", "sky", "?", "blue", "and", "the", "sea", "?", "green", "or", "grey"]


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 that answers, with positions that matter and probabilities far from even."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("chat")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=128,
        bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def make_texts(count: int) -> list[str]:
    dice = random.Random(0)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, 20))) for _ in range(count)]


def make_settings(folder: Path, **values: Any) -> dict[str, Any]:
    return {
        "task": "causal_lm", "load": str(folder), "eval_micro_batch_size": 2, "max_new_tokens": 6,
        "chat_template": "none", **values,
    }  # fmt: skip


def predict(settings: dict[str, Any], rows: list[Any]) -> list[dict[str, Any]]:
    engine = RapidformerEngine(args=settings)
    answers = predict_task(engine, rows)
    engine.close()
    return answers


# ---- every row once, on any layout ---------------------------------------------------------------


def _predict_each(settings: dict[str, Any], layouts: list[str], rows: list[str]) -> list[Any]:
    sizes = [True if layout.startswith("zero") else 2 for layout in layouts]
    given = zip(layouts, sizes, strict=True)
    return [predict({**settings, layout: size}, rows) for layout, size in given]


def test_two_ranks_answer_as_one(chat_folder: Path) -> None:
    """37 rows: two groups, padded batches, and a last round with a filler."""
    rows = make_texts(37)
    settings = make_settings(chat_folder, do_sample=True, temperature=0.7, max_new_tokens=4)
    alone = predict(settings, rows)
    assert [answer["text"] for answer in alone] == rows
    assert len({answer["generated"] for answer in alone}) > 20
    layouts = [
        "zero_3_memory_optimization", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    ]  # fmt: skip
    for answers in run_in_kept_processes(_predict_each, 2, settings, layouts, rows):
        assert dict(zip(layouts, answers, strict=True)) == dict.fromkeys(layouts, alone)


def _count(settings: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """Which samples a rank's steps saw, and what came back."""
    engine = RapidformerEngine(args=settings)
    engine.model.compose_for_evaluation(torch.nn.Linear(1, 1))
    seen: list[int] = []
    rows = [{"input_ids": [n] * (1 + n % 5)} for n in range(45)]

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.extend(batch["input_ids"].max(dim=1).values.tolist())
        return batch["input_ids"].max(dim=1).values

    lengths = [len(row["input_ids"]) for row in rows]
    found = [
        int(value)
        for value in predict_rows(
            engine.data, engine.model, rows, step, batch_size=2, lengths=lengths
        )
    ]
    engine.close()
    return found, seen


def test_the_engine_predicts_every_sample_once() -> None:
    results = run_in_kept_processes(_count, 2, {"micro_batch_size": 2})
    for found, _ in results:
        assert found == list(range(45))
    first, second = (seen for _, seen in results)
    # 45 samples are 23 batches, so one rank gets a filler in the last round.
    assert len(first) + len(second) == 46 and set(first) | set(second) == set(range(45))
    assert first[:2] == [4, 9], "the longest of the first group come first"


def test_a_step_must_return_a_result_per_row() -> None:
    engine = RapidformerEngine(args={"micro_batch_size": 2})
    engine.model.compose_for_evaluation(torch.nn.Linear(1, 1).train())
    rows = [{"input_ids": [1]}] * 2
    with pytest.raises(Exception, match=r"returned 1 results for a batch of 2 rows"):
        list(predict_rows(engine.data, engine.model, rows, lambda batch: [1]))
    engine.close()


def test_windows_and_images_come_back_in_order(
    bert_folder: Path, vit_folder: Path, tmp_path: Path
) -> None:
    """Groups of 16 rows, sorted by length, and one group of all in the order of the data."""
    questions: list[Any] = [
        {"question": "who lives ?", "context": "john lives in paris . " * (1 + n * 7 % 11)}
        for n in range(18)
    ]
    images: list[Any] = []
    for number in range(18):
        images.append({"image": str(tmp_path / f"{number}.png")})
        Image.new("RGB", (8, 8), (14 * number, 0, 0)).save(images[-1]["image"])
    for task, folder, rows in (
        ("question_answering", bert_folder, questions),
        ("image_classification", vit_folder, images),
    ):
        settings = {
            "task": task, "load": str(folder), "allow_untrained": True, "log_level": "error",
            "seq_length": 32, "doc_stride": 8,
        }  # fmt: skip
        found = []
        for size in (1, 64):
            torch.manual_seed(0)  # a head that was never trained
            found.append(predict({**settings, "eval_micro_batch_size": size}, rows))
        for one, other, row in zip(*found, rows, strict=True):
            assert row.items() <= one.items()
            assert one.pop("score") == pytest.approx(other.pop("score"), abs=1e-4)
            one.pop("scores", None), other.pop("scores", None)
            assert one == other


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.0, 5.0, 20.0, 25.0, 40.0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(predicting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with show_progress(108, "predicting", wanted=None, done=100) as advance:
        for _ in range(4):
            advance(2)
    assert caplog.messages == ["predicting | 104 of 108 | 0.2/s | 0:00:20 left"]


def test_a_progress_bar_leaves_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are written while it is shown, and stdout may be a file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    stdout = sys.stdout
    with show_progress(2, "predicting", wanted=True) as advance:
        advance(1)
        assert sys.stdout is stdout


# ---- how texts are generated ---------------------------------------------------------------------


def test_answers_follow_the_settings(chat_folder: Path) -> None:
    rows = make_texts(3)
    greedy = predict(make_settings(chat_folder, max_new_tokens=12), rows)
    assert predict(make_settings(chat_folder, max_new_tokens=12), rows) == greedy
    stop = greedy[0]["generated"][2:4]
    stopped = predict(make_settings(chat_folder, max_new_tokens=12, stop_strings=[stop]), rows)
    assert stopped[0]["generated"] == greedy[0]["generated"].partition(stop)[0]
    sampling = {"do_sample": True, "num_return_sequences": 3, "top_k": 9, "min_p": 0.01}
    drawn = predict(make_settings(chat_folder, **sampling), rows)
    assert all(len(set(answer["generated"])) > 1 for answer in drawn)
    assert predict(make_settings(chat_folder, **sampling, seed=5), rows) != drawn
    beams = predict(make_settings(chat_folder, num_beams=3, num_return_sequences=2), rows[:1])
    assert len(beams[0]["generated"]) == 2
    punished = predict(make_settings(chat_folder, repetition_penalty=9.0), rows)
    assert punished != predict(make_settings(chat_folder), rows)


def test_predict_by_call(chat_folder: Path, tmp_path: Path) -> None:
    settings = {"max_new_tokens": 4, "chat_template": "none", "load": str(chat_folder)}
    (alone,) = rapidformer.predict("the sky", **settings)
    assert list(alone) == ["text", "generated"]
    (tmp_path / "p.txt").write_text("the sky\nthe sea\n")
    target = tmp_path / "answers.json"
    found = rapidformer.predict(tmp_path / "p.txt", output=str(target), **settings)
    assert found[0] == alone and json.loads(target.read_text()) == found
    rows = datasets.Dataset.from_list([{"id": 7, "text": "the sky"}])
    assert rapidformer.predict(rows, **settings) == [{"id": 7, **alone}]


def test_stop_strings_need_a_tokenizer_that_knows_all_texts(gpt_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"--stop-strings: the tokenizer of .* maps unknown words"):
        predict(make_settings(gpt_folder, stop_strings=["x"]), ["the cat"])


def test_answers_are_streamed_in_order(chat_folder: Path, capsys: Any) -> None:
    rows = make_texts(3)
    settings = make_settings(chat_folder, max_new_tokens=12)
    expected = [answer["generated"] for answer in predict(settings, rows)]
    stop = expected[0][2:4]
    cut = [text.partition(stop)[0] for text in expected]
    for stops, texts in ((None, expected), ([stop], cut)):
        predict({**settings, "stream": True, "stop_strings": stops}, rows)
        blocks = [f"> {row}\n{text}\n" for row, text in zip(rows, texts, strict=True)]
        assert capsys.readouterr().out == "".join(blocks)


def test_a_conversation_remembers_its_turns(
    chat_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        words = ["--task", "causal_lm", "--load", str(chat_folder), "--max-new-tokens", "6"]
        assert main(["predict", "--chat", *words]) == 0
        return str(capsys.readouterr().out).split("\n")

    first, second = talk("what is the sky ?", "and the sea ?")[:2]
    assert talk("and the sea ?")[0] != second, "it depends on the turn before"
    assert talk("what is the sky ?", "/new", "what is the sky ?", "/exit", "x")[:3] == [
        first, first, "",
    ]  # fmt: skip


# ---- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("p.txt", "a b\n\nc\n", ["a b", "c"]),
        ("p.json", '["a b", "c"]', ["a b", "c"]),
        ("p.json", '[{"text": "a b"}]', [{"text": "a b"}]),
        ("p.jsonl", '{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
        ("p.csv", "id,text\n1,a\n", [{"id": 1, "text": "a"}]),
    ],
)
def test_files_of_prompts(name: str, content: str, rows: list[Any], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    for flag in ("--input", "--data-path"):
        args = name_input_files(parse_arguments(["--task", "causal_lm", flag, str(path)]))
        assert args.input is None and read_input(args) == rows
    args = args.replace("test", max_predict_samples=1)
    assert read_input(args) == rows[:1]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_arguments(["--task", "causal_lm", "--input", "-"])
    for text, rows in (("a\n\nb c\n", ["a", "b c"]), ('{"prompt": "a"}\n', [{"prompt": "a"}])):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert read_input(args) == rows
    for text, message in (("\n", "standard input is empty"), ('a\n{"b": 1}\n', "mixes texts")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(DataError, match=message):
            read_input(args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--temperature", "0.5", "--no-do-sample"],
            "says how to sample, and --no-do-sample not to",
        ),
        (["--top-p", "2", "--do-sample"], "--top-p must be above 0 and at most 1, got 2.0"),
        (["--num-return-sequences", "3"], "needs --do-sample or --num-beams 3: all answers would"),
        (["--num-return-sequences", "3", "--num-beams", "2"], "needs --num-beams 3: 2 beams give"),
        (["--stream", "--num-beams", "2"], "cannot be combined with --num-beams 2"),
        (["--stream", "--output", "x.json"], "give either --stream or --output x.json"),
        (["--stream", "--nproc-per-node", "2"], "2 data-parallel ranks: start 1 with"),
        (["--chat"], "--chat takes what you type: leave out --input"),
        (["--data-path", "x.txt"], "--input and --data-path exclude each other"),
        (["--stop-strings", ""], "--stop-strings must not be empty"),
        (["--task", "masked_lm", "--stream"], "--stream needs a task that generates text"),
        (["--task", "seq2seq_lm", "--chat"], "--chat needs --task causal_lm or image_text, not"),
    ],
)
def test_contradictions_are_found_at_once(
    words: list[str], message: str, gpt_folder: Path, capsys: Any
) -> None:
    base = ["--task", "causal_lm", "--load", str(gpt_folder), "--input", "the cat"]
    assert main(["predict", *base, *words]) == 1
    assert message in capsys.readouterr().err


# ---- where the model comes from ------------------------------------------------------------------


def _save(folder: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = RapidformerEngine(args={"tensor_model_parallel_size": 2, "lr": 0.1})
    engine.compose(AutoModelForCausalLM.from_pretrained(folder))
    engine.save_checkpoint(target, processor=AutoTokenizer.from_pretrained(folder))
    engine.close()


def test_a_checkpoint_of_any_layout_answers(chat_folder: Path, tmp_path: Path, capsys: Any) -> None:
    run_in_kept_processes(_save, 2, chat_folder, tmp_path / "run")
    words = ["--chat-template", "none", "--max-new-tokens", "6", "--input", "the sky"]
    answers = []
    for location in (chat_folder, tmp_path / "run", tmp_path / "run" / "iter_0000000"):
        assert main(["predict", "--load", str(location), *words]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] == answers[2]

    run_file = tmp_path / "run" / "iter_0000000" / "run.json"
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "base": {}}))
    assert main(["predict", "--load", str(tmp_path / "run"), *words]) == 1
    assert "holds an adapter's state without the model under it" in capsys.readouterr().err


def test_load_may_name_a_model_on_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("gpt2", "org/model"):
        args = choose_run_model(parse_arguments(["--load", name]), "predict")
        assert (args.load, args.pretrained_model_name_or_path) == (None, name)
    for name in ("./model", "runs/model", "a/b/c"):
        args = choose_run_model(parse_arguments(["--load", name]), "predict")
        assert args.load == name, "a folder that is not there"


def test_the_task_follows_from_the_model(chat_folder: Path, tmp_path: Path) -> None:
    assert guess_task(str(chat_folder)) == "causal_lm"
    adapter = {"task_type": "SEQ_CLS", "base_model_name_or_path": "x"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert guess_task(str(tmp_path)) == "sequence_classification"
    assert guess_task("org/model") is guess_task(None) is None


# ---- a killed run --------------------------------------------------------------------------------


def _run_until_stuck(words: list[str]) -> None:
    """Predict, but hang in the third group with half a row on the disk."""
    append = PartialPredictions.append

    def append_or_hang(self: Any, rows: list[Any]) -> None:
        append(self, rows)
        if sum(1 for _ in self) >= 64:
            with self._path.open("a") as file:
                file.write('{"text": "ha')
            time.sleep(PATIENCE)

    PartialPredictions.append = append_or_hang  # type: ignore[method-assign]
    main(words)


def test_a_finished_file_has_the_lines_of_the_unfinished_one(tmp_path: Path) -> None:
    target = tmp_path / "answers.jsonl"
    partial = PartialPredictions(target, "key")
    assert partial.resume(2) == 0
    partial.append([{"text": "ü", "score": math.nan}, {"text": "b", "scores": [math.inf, 0.5]}])
    partial.finish()
    assert target.read_bytes() == (
        '{"text": "ü", "score": null}\n{"text": "b", "scores": [null, 0.5]}\n'.encode()
    )
    assert list(tmp_path.iterdir()) == [target]


def test_of_a_damaged_file_the_rows_before_the_damage_are_kept(tmp_path: Path) -> None:
    target, file = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.partial"
    rows = [{"text": str(number)} for number in range(6)]
    for damage in (b"\xff\x00", b"[1]", b"[" * 100_000, b"9" * 5000):
        partial = PartialPredictions(target, "key")
        assert partial.resume(2) == 0
        partial.append(rows)
        lines = file.read_bytes().split(b"\n")
        lines[5] = damage
        file.write_bytes(b"\n".join(lines))
        assert partial.resume(2) == 4
        partial.append(rows[4:])
        partial.finish()
        assert [json.loads(line) for line in target.read_text().splitlines()] == rows
    os.mkfifo(file)
    with pytest.raises(ConfigurationError, match="is not a regular file: remove it"):
        PartialPredictions(target, "key").resume(2)


def test_a_killed_run_resumes(chat_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "rows.txt").write_text("\n".join(make_texts(80)) + "\n")
    target, partial = tmp_path / "answers.csv", tmp_path / "answers.csv.partial"
    words = [
        "predict", "--task", "causal_lm", "--load", str(chat_folder), "--do-sample",
        "--eval-micro-batch-size", "2", "--max-new-tokens", "3", "--chat-template", "none",
        "--input", str(tmp_path / "rows.txt"), "--output",
    ]  # fmt: skip
    process = multiprocessing.get_context("fork").Process(
        target=_run_until_stuck, args=([*words, str(target)],)
    )
    process.start()
    deadline = time.monotonic() + PATIENCE
    while not (partial.is_file() and partial.read_text().endswith('"ha')):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not target.exists()

    starts: list[int] = []

    def watch(*args: Any, start: int, **kwargs: Any) -> Any:
        starts.append(start)
        return iterate_predictions(*args, start=start, **kwargs)

    monkeypatch.setattr("rapidformer.tasks.evaluation.predicting.iterate_predictions", watch)
    assert main([*words, str(target)]) == 0
    whole = tmp_path / "whole.csv"
    assert main([*words, str(whole)]) == 0
    assert starts == [64, 0], "the complete groups of the killed run are kept"
    assert target.read_text() == whole.read_text() and not partial.exists()
    with target.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 80


def test_an_unfinished_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    target, rows = tmp_path / "p.jsonl", [{"id": n} for n in range(5)]
    first = PartialPredictions(target, "a")
    assert first.resume(2) == 0
    first.append(rows)
    assert PartialPredictions(target, "a").resume(2) == 4
    assert len(list(first)) == 4
    assert PartialPredictions(target, "b").resume(2) == 0
    assert list(first) == []
    first.append(rows)
    first.finish()
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows
