"""The command as a user types it: help, configuration, tasks, train, evaluate, predict, plot."""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from rapidformer.cli import COMMANDS
from rapidformer.cli.help import TOPICS
from rapidformer.cli.main import main as run_command
from rapidformer.cli.main import shorten
from rapidformer.config import get_settings


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = run_command(words)
    said = capsys.readouterr()
    assert status == (0 if said.out else 1)
    assert max(map(len, said.out.splitlines()), default=0) <= 80
    return said.out + said.err


def test_help_starts_short_and_leads_to_every_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = show(capsys)
    assert page == show(capsys, "--help") == show(capsys, "help")
    for part in ("evaluate", "--pretrained-model-name-or-path", "--help TOPIC", *TOPICS):
        assert part in page
    assert "--zero-1-memory-optimization" not in page
    everything = show(capsys, "--help", "all")
    assert all(setting.flag.removeprefix("--") in everything for setting in get_settings().values())
    assert {setting.section for setting in get_settings().values()} == set(TOPICS.values())
    # Brackets: the flag may have no value, or a --no- form.
    for flag in ("--cuda-graph auto|on|off ", "--resume [auto] ", "--[no-]keep-last "):
        assert flag in everything


def test_help_of_a_command_a_topic_a_word_and_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = show(capsys, "predict", "--help")
    assert page.startswith("usage: rapidformer predict") and "--max-new-tokens" in page
    assert page == show(capsys, "help", "predict") == show(capsys, "--help", "predict")
    assert "--epochs" not in page and "--data-path" in show(capsys, "help", "data")
    assert "--zero-1-memory-optimization" in show(capsys, "--help", "switches")
    assert "--lora-dropout" in show(capsys, "--help", "dropout")
    assert show(capsys, "--help", "--learning-rate").count("peak learning rate") == 1
    assert "no flag mentions 'xyzzy'" in show(capsys, "--help", "xyzzy")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: rapidformer {name}" if name != "train" else "usage:")


@pytest.mark.parametrize(
    ("names", "frames"),
    [
        ("fail()", ["<module>", "fail"]),
        ("[None]", ["<module>", "find_nearest"]),
        ("installed.fail()", ["<module>", "find_nearest"]),
    ],
    ids=["in the script", "in the library", "in what the library calls"],
)
def test_a_traceback_shows_the_library_only_if_the_error_may_be_there(
    names: str, frames: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "home" / "site-packages"  # of the user, not of this Python
    packages.mkdir(parents=True)
    function = "def fail():\n    yield 'task'\n    raise AttributeError\n"
    (packages / "installed.py").write_text(function)
    (tmp_path / "script.py").write_text(
        "import installed\nfrom rapidformer.nearest import find_nearest\n"
        f"{function}find_nearest('tsak', {names})\n"
    )
    monkeypatch.syspath_prepend(packages)
    with pytest.raises(AttributeError) as caught:
        runpy.run_path(str(tmp_path / "script.py"))
    shown = [frame.name for frame in traceback.extract_tb(shorten(caught.tb))]
    assert shown[: len(frames)] == frames
    assert ("find_nearest" in shown) == ("find_nearest" in frames)


def test_a_failing_script_shows_its_own_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("def divide():\n    return 1 / 0\n\n\ndivide()\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run_command(["--user-script", str(script), "--log-level", "error"]) == 1
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
    assert shown == [
        f'  File "{script}", line 5, in <module>',
        f'  File "{script}", line 2, in divide',
    ]


def test_version(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = command("--version").stdout
    assert shown.startswith("rapidformer 0.")
    monkeypatch.setattr(sys, "argv", ["python -m rapidformer", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("rapidformer", run_name="__main__")
    assert capsys.readouterr().out == shown


def test_tasks_are_listed_with_their_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listing = show(capsys, "tasks")
    for name in (
        "sequence_classification", "token_classification", "question_answering", "masked_lm",
        "causal_lm", "casual_lm", "seq2seq_lm", "multiple_choice", "image_classification",
    ):  # fmt: skip
        assert name in listing
    assert "sentence1" in listing and "ner_tags" in listing
    one = show(capsys, "tasks", "ner")
    assert one.startswith("token_classification\n") and "--label-column, or found as" in one
    assert "sentence1" not in one
    assert "is not a task" in show(capsys, "tasks", "nonsense")
    assert "pre-training" not in one and "preprocess" in show(capsys, "tasks", "pretraining")


def test_print_config_shows_values_and_their_origin(command: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr: 3e-5\nepochs: 2\n")
    done = command("--config", tmp_path / "run.yaml", "--epochs", 5, "--fp16", "--print-config")
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert "3.0e-05" in lines["lr"] and "run.yaml" in lines["lr"]
    assert "epochs: 5" in lines["epochs"] and "command line" in lines["epochs"]
    assert "derived: --fp16" in lines["mixed_precision"]
    assert "default" in lines["seed"]


@pytest.fixture(scope="module")
def trained(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rapidformer.cli.main import main

    folder = tmp_path_factory.mktemp("runs") / "run"
    words = [
        "--task", "sequence_classification", "--pretrained-model-name-or-path", small_model,
        "--data-path", small_data, "--epochs", 8, "--micro-batch-size", 8, "--lr", 3e-3,
        "--save", folder, "--log-interval", 2,
    ]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    return folder


def test_training_learns_and_leaves_everything(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    results = {name: value for line in lines for name, value in line.items()}
    assert results["eval_accuracy"] > 0.9 and results["test_accuracy"] > 0.8
    for name in ("best", "last", "arguments.yaml", "tensorboard", "metrics.jsonl"):
        assert (trained / name).exists()


def test_evaluate(command: Any, trained: Path, small_data: Path, tmp_path: Path) -> None:
    words = [
        "evaluate", "--task", "sequence_classification", "--load", trained / "best",
        "--data-path", small_data, "--eval-split", "test", "--output", tmp_path / "metrics.json",
    ]  # fmt: skip
    done = command(*words)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert json.loads(done.stdout) == metrics
    assert metrics["accuracy"] > 0.8 and metrics["split"] == "test"


@pytest.mark.slow
def test_evaluate_on_two_processes_gives_the_same(
    command: Any, rapidformer: Any, trained: Path, small_data: Path
) -> None:
    words = [
        "evaluate", "--task", "sequence_classification", "--load", trained / "best",
        "--data-path", small_data, "--eval-split", "test", "--micro-batch-size", 4,
    ]  # fmt: skip
    one, two = command(*words), rapidformer(*words, "--nproc-per-node", 2)
    assert two.returncode == 0, two.stderr
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert first["accuracy"] == second["accuracy"]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)


def test_evaluate_a_split_that_is_not_there(command: Any, trained: Path, small_data: Path) -> None:
    done = command(
        "evaluate", "--task", "sequence_classification", "--load", trained / "best",
        "--data-path", small_data, "--eval-split", "holdout",
    )  # fmt: skip
    assert done.returncode == 1 and "holdout" in done.stderr


def test_predict_on_texts(command: Any, trained: Path) -> None:
    done = command(
        "predict", "--task", "sequence_classification", "--load", trained / "best", "--input",
        '{"sentence1": "w1 w2 w3 w4 w5", "sentence2": "w30"}',
        '{"sentence1": "w31 w32 w33 w34 w35", "sentence2": "w30"}',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["label"] for answer in answers] == ["1", "0"]


def test_predict_on_a_file(command: Any, trained: Path, small_data: Path, tmp_path: Path) -> None:
    done = command(
        "predict", "--task", "sequence_classification", "--load", trained / "best",
        "--data-path", small_data / "test.jsonl", "--output", tmp_path / "out.jsonl",
        "--max-predict-samples", 5,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5


def test_predict_without_anything_to_predict_on(command: Any, trained: Path) -> None:
    done = command("predict", "--task", "sequence_classification", "--load", trained / "best")
    assert done.returncode == 1 and "--input" in done.stderr


def test_plot(command: Any, trained: Path, tmp_path: Path) -> None:
    done = command("plot", trained, "--output", tmp_path / "curve.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_folder_without_a_run(command: Any, tmp_path: Path) -> None:
    done = command("plot", tmp_path)
    assert done.returncode == 1 and "metrics.jsonl" in done.stderr


def test_resuming_from_the_command(
    command: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    words = [
        "--task", "sequence_classification", "--pretrained-model-name-or-path", small_model,
        "--data-path", small_data, "--micro-batch-size", 16, "--lr", 2e-3, "--log-interval", 1,
        "--epochs", 2,
    ]  # fmt: skip
    assert command(*words, "--save", tmp_path / "whole").returncode == 0
    part = ["--save", tmp_path / "part"]
    assert command(*words, *part, "--exit-interval", 4).returncode == 0
    assert command(*words, *part, "--load", tmp_path / "part").returncode == 0

    def read(name: str) -> list[float]:
        text = (tmp_path / name / "metrics.jsonl").read_text()
        return [json.loads(line)["loss"] for line in text.splitlines() if '"loss"' in line]

    assert read("part") == read("whole")


def test_a_model_from_scratch_by_its_sizes(
    command: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    done = command(
        "--task", "sequence_classification", "--pretrained-model-name-or-path", small_model,
        "--from-scratch", "--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2,
        "--data-path", small_data, "--epochs", 1, "--save", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 16)


def test_a_run_means_its_best_model(command: Any, trained: Path, small_data: Path) -> None:
    words = ["evaluate", "--task", "sequence_classification", "--data-path", small_data]
    of_run = command(*words, "--load", trained)
    assert of_run.returncode == 0, of_run.stderr
    of_best = command(*words, "--load", trained / "best")
    shown, expected = json.loads(of_run.stdout), json.loads(of_best.stdout)
    assert shown.pop("seconds") > 0 and expected.pop("seconds") > 0
    assert shown == expected


def test_a_folder_without_a_model_is_refused(
    command: Any, small_data: Path, tmp_path: Path
) -> None:
    done = command(
        "evaluate", "--task", "sequence_classification", "--data-path", small_data,
        "--load", tmp_path,
    )  # fmt: skip
    assert done.returncode == 1 and "has no model" in done.stderr
