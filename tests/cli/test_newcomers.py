"""What a newcomer meets: a run that was stopped, mistakes, calls from a notebook."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

import rapidformer
from rapidformer.cli.chat import Conversation
from rapidformer.cli.checks import check_command
from rapidformer.config import resolve
from rapidformer.config.parse import read_flags
from rapidformer.data.heads import keep_rows
from rapidformer.errors import ConfigurationError, ModelError
from tests.tasks.test_predicting import chat_folder as chat_folder

Command = Callable[..., subprocess.CompletedProcess[str]]
ROWS = [{"prompt": f"what is {n} ?", "response": "blue"} for n in range(8)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def stopped(command: Command, rows: Path, chat_folder: Path, tmp_path: Path) -> Path:
    """A run of 4 steps that was told to stop after 2."""
    done = command(
        "--task", "causal_lm", "--pretrained-model-name-or-path", chat_folder, "--data-path", rows,
        "--seq-length", 64, "--epochs", 1, "--micro-batch-size", 2, "--exit-interval", 2,
        "--save", tmp_path / "runs" / "chat",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "chat"
    for line in (
        f"resume    run the same command with --load {run}",
        f"next      rapidformer evaluate --load {run} --data-path FILE",
        f"          rapidformer predict --load {run} --chat",
        f"          rapidformer export {run} FOLDER",
    ):
        assert line in done.stderr
    return run


def test_a_stopped_run_is_seen_gone_on_with_and_compared(
    command: Command, stopped: Path, tmp_path: Path
) -> None:
    (entry,) = json.loads(command("runs", stopped, "--json").stdout)["runs"]
    assert (entry["state"], entry["step"], entry["train_iters"]) == ("stopped", 2, 4)
    assert "2 of 4" in command("runs", stopped).stdout

    done = command("--load", stopped.with_name("chta"), "--epochs", "2")
    assert f"chta: no such folder. Did you mean {stopped}?" in done.stderr
    done = command("--load", stopped, "--epochs", "2", "--exit-interval", "100")
    assert done.returncode == 0, done.stderr
    assert "resumed   from" in done.stderr and "8 steps = 2 epochs" in done.stderr
    (entry,) = json.loads(command("runs", stopped, "--json").stdout)["runs"]
    assert (entry["state"], entry["step"]) == ("complete", 8)

    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    done = command("plot", stopped, other)
    assert done.returncode == 0 and done.stdout == "curves.png\n", done.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("word", ["predict", "evaluate"])
def test_a_misspelt_folder_is_the_only_problem(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/mrpc").mkdir(parents=True)
    with pytest.raises(ConfigurationError) as caught:
        check_command(word, read_flags(["--load", "runs/mrcp", "--data-path", "rows.jsonl"]))
    expected = "--load runs/mrcp: no such folder. Did you mean runs/mrpc?"
    assert caught.value.problems[0] == expected
    assert not any("--task" in problem for problem in caught.value.problems)


def test_a_conversation_fills_the_models_context_and_may_have_a_system_prompt(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = check_command("predict", read_flags(
        ["--load", str(stopped), "--chat", "--max-new-tokens", "2", "--system-prompt", "be brief"]
    ))  # fmt: skip
    engine = rapidformer.RapidformerEngine(args=args)
    talk = Conversation(engine)
    assert talk._prepared.extras["prompt_length"] == 126, "of 128, not of --seq-length 64"
    talk.answer("what is the sky ?")
    for _ in range(4):
        talk.answer("and the sea ? " * 4)
    assert engine.args.system_prompt == "be brief"
    text = talk._encoder.tokenizer.decode(talk._encode())
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>"), "what is forgotten is older"
    assert "what is the sky" not in text
    engine.close()


def test_a_system_prompt_needs_turns(chat_folder: Path) -> None:
    given = {"load": str(chat_folder), "max_new_tokens": 2, "system_prompt": "be brief"}
    alone = rapidformer.predict("what ?", load=str(chat_folder), max_new_tokens=2)
    told = rapidformer.predict(["what ?"], **given)
    assert told[0]["prompt"] == alone[0]["prompt"] == "what ?"
    with pytest.raises(ConfigurationError, match="--system-prompt needs a chat template"):
        rapidformer.predict(["what ?"], **given, chat_template="none")


def test_sampling_is_asked_for_by_its_settings() -> None:
    def read(*words: str) -> Any:
        return resolve(read_flags(["--task", "causal_lm", *words]).args)

    assert not read().do_sample
    for words in (["--top-p", "0.9"], ["--top-k", "5"], ["--temperature", "0.7"]):
        assert read(*words).do_sample
    assert read("--top-p", "0.9", "--num-return-sequences", "3").do_sample
    with pytest.raises(ConfigurationError, match="says how to sample, and --no-do-sample not to"):
        read("--no-do-sample", "--top-p", "0.9")


def test_the_command_line_turns_a_files_sampling_off(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("task: causal_lm\ntemperature: 0.7\n")
    words = ["--config", str(tmp_path / "file.yaml")]
    assert resolve(read_flags(words).args).do_sample
    assert not resolve(read_flags([*words, "--no-do-sample"]).args).do_sample
    with pytest.raises(ConfigurationError, match="needs --do-sample or --num-beams 3"):
        resolve(read_flags([*words, "--no-do-sample", "--num-return-sequences", "3"]).args)


def find(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.chdir(folder)
    try:
        check_command("train", read_flags(list(words)))
    except ConfigurationError as error:
        return error.problems
    return []


def test_column_hints(tmp_path: Path, chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(task: str, **files: Any) -> list[str]:
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_text(content)
        paths = [name.replace("_", ".") for name in files]
        return find(
            tmp_path, monkeypatch, "--task", task, "--pretrained-model-name-or-path",
            str(chat_folder), "--data-path", *paths,
        )  # fmt: skip

    (text,) = ask("sequence_classification", a_csv="text,table\nx,1\n")
    assert "--label-column NAME" in text, "a table is no label"
    (text,) = ask("sequence_classification", a_csv="text,the labels\nx,1\n")
    assert text.endswith("name it with --label-column 'the labels'.")
    (text,) = ask("sequence_classification", a_csv="text;label\nx;1\n")
    assert "one column, 'text;label': it seems to be separated by ';'" in text
    lines = '{"text": "x", "label": 1}\n'
    (text,) = ask("sequence_classification", a_jsonl=lines, b_csv="body,label\nx,1\n")
    assert text.startswith("b.csv: No column with")
    preference = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
    (text,) = ask("causal_lm", a_jsonl=preference)
    assert "give --prompt-column prompt --response-column chosen." in text
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    preference = json.dumps({"chosen": turns, "rejected": turns}) + "\n"
    (text,) = ask("causal_lm", a_jsonl=preference)
    assert "give --messages-column chosen, if its turns begin with the prompt." in text


def test_streaming_is_not_taken_for_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = find(tmp_path, monkeypatch, "--task", "causal_lm", "--streaming")
    assert problems[0].startswith("--streaming: the data has no known length: give --train-iters N")


def test_other_mistakes(command: Command, tmp_path: Path, small_model: Path, rows: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nw1,yes\nw2,no\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "splits.json").write_text('{"train": [{"text": "a", "label": 1}], "test": []}')
    model = ["--pretrained-model-name-or-path", small_model]
    task = ["--task", "sequence_classification", *model, "--save", "none"]
    for words, message in (
        ([*task, "--data-path", "rows.cvs"], "with --data-path. Did you mean rows.csv?"),
        ([*task, "--data-path", "empty.csv"], "empty.csv is empty (0 bytes)."),
        ([*task, "--data-path", "rows.csv", "--chat"], "--chat is for `rapidformer predict`"),
        (
            ["--task", "causal_lm", *model, "--data-path", rows],
            "(bert) is an encoder: under --task",
        ),
        ([*task, "--data-path", "splits.json"], "The data holds splits (train, test), not rows"),
        (
            ["predict", "--load", small_model, "--input", "w1", "--temperature", "0"],
            "--temperature 0 would draw nothing: leave it out",
        ),
        (
            ["predict", "--load", small_model, "--input", "w1", "--output", "x.xlsx"],
            "--output x.xlsx: end the name in .jsonl, .json, .csv, .tsv or .parquet.",
        ),
        (
            ["evaluate", "--load", small_model, "--data-path", "rows.csv", "--eval-split", "tst"],
            "choose another with --eval-split, or give other data with --data-path.",
        ),
        (["plot", "row.csv"], "row.csv does not exist. Did you mean rows.csv?"),
        (["plot", "rows.csv"], "rows.csv has no metrics.jsonl: give the folder of a run"),
        (["--lora"], "unknown flag --lora: did you mean one of --lora-rank, --lora-alpha, "),
        (["--checkpoint"], "unknown flag --checkpoint: did you mean --checkpoint-activations?"),
        ([*task, "--data-path", "rows.csv", "--lr", "nan"], "--lr must be a number, got nan."),
    ):
        done = command(*words)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_training_and_prediction_by_call(
    tmp_path: Path, small_model: Path, chat_folder: Path
) -> None:
    table = pandas.DataFrame({
        "text": [f"w{n} w1" for n in range(12)], "label": ["no", "yes"] * 6,
        "note": [None, 1.5] * 6,
    })  # fmt: skip
    common: dict[str, Any] = {
        "task": "sequence_classification", "pretrained_model_name_or_path": str(small_model),
        "train_iters": 2, "micro_batch_size": 4, "log_level": "error",
    }  # fmt: skip
    metrics = rapidformer.train(table, **common, validation_split=0.25, save=str(tmp_path / "a"))
    assert set(metrics) >= {"accuracy", "loss"}
    frames = {"train": table[:9], "validation": table[9:]}
    rapidformer.train(frames, **common, save=str(tmp_path / "b"))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *table[["text", "label"]].values])
    rapidformer.train(tmp_path / "rows.csv", **common, save=str(tmp_path / "c"))
    asked = table[["text"]][:3]
    answers = rapidformer.predict(asked, load=str(tmp_path / "a"))
    assert [row["text"] for row in answers] == list(asked["text"])
    assert rapidformer.evaluate(table, load=str(tmp_path / "a")).examples == 12
    with pytest.raises(ConfigurationError, match="nothing to train: give --task"):
        rapidformer.train(table)
    with pytest.raises(ConfigurationError, match="No column with"):
        rapidformer.train(table[["text"]], **common)


def test_lists_in_a_parquet_file_are_lists(tmp_path: Path) -> None:
    """pandas reads them as arrays."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pandas.DataFrame({"messages": [turns] * 3}).to_parquet(tmp_path / "rows.parquet")
    table = pandas.read_parquet(tmp_path / "rows.parquet")
    assert keep_rows(table) == [{"messages": turns}] * 3


@pytest.mark.parametrize(
    ("kind", "task", "problem"),
    [
        ("qwen2_vl", "masked_lm", r"model \(qwen2_vl\) also reads images or sound, and --task mas"),
        ("blip-2", "causal_lm", "Blip2ForConditionalGeneration cannot be called without pixel_val"),
        ("florence2", "causal_lm", "has no class for it that reads text from left to right"),
    ],
)
def test_a_model_that_sees_is_refused_if_text_cannot_train_it(
    kind: str, task: str, problem: str, tmp_path: Path, rows: Path
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    model = str(tmp_path / "model")
    options: dict[str, Any] = {
        "pretrained_model_name_or_path": model,
        "save": "none",
        "train_iters": 1,
        "text_column": "prompt" if task == "masked_lm" else None,
    }
    with pytest.raises(ModelError, match=problem):
        rapidformer.train(rows, task=task, **options)
    with pytest.raises(ConfigurationError, match="--train-vision and --train-projector need imag"):
        rapidformer.train(rows, task=task, train_vision=True, **options)
