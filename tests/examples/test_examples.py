"""The examples on several processes, with the switches that the documents show them with."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer.cli.main import main
from tests.processes import find_free_port
from tests.small import make_pair_data

pytestmark = pytest.mark.usefixtures("as_the_processor_can")
EXAMPLES = Path(__file__).parents[2] / "examples"
TWO = pytest.mark.parametrize("processes", [2])


@pytest.fixture(scope="module")
def even_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches of one size: compiling for any size takes each rank ten seconds."""
    return make_pair_data(
        tmp_path_factory.mktemp("even"), train=128, validation=32, test=32, words=6
    )


def _common(model: Path, data: Path, processes: int) -> list[object]:
    return [
        "--pretrained-model-name-or-path", model, "--data-path", data, "--epochs", 2,
        "--micro-batch-size", 16, "--lr", 2e-3, "--lr-decay-style", "linear",
        "--lr-warmup-iters", 2, "--weight-decay", 1e-2, "--clip-grad", 1.0,
        "--nproc-per-node", processes,
    ]  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_black_box(
    python: Path,
    processes: int,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
) -> None:
    """The documents' fine-tuning command, every switch included.

    One process compiles blocks, without generating code, which would take more than a minute. Two
    run the command as it is: compiled blocks on several ranks are in test_finetuner.
    """
    folder, compiles = tmp_path / "run", ["--compile-backend", "eager"] * (processes == 1)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "black_box.sh"), "--lr", "2e-3", "--lr-warmup-iters", "2",
         "--log-interval", "1", "--save", str(folder), "--nproc-per-node", str(processes),
         *compiles],
        env={
            **os.environ,
            "MODEL": str(small_model),
            "DATA": str(small_data),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        },
        capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "64 = 16 micro" in done.stderr
    if processes == 1:
        assert "torch.compile of 2 blocks with eager" in done.stderr
    else:
        assert "--compile has no effect: on a CPU" in done.stderr
        assert "ZeRO: stage 1 over 2 ranks" in done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 5, 6]
    assert {"lr", "grad_norm", "tokens_per_second", "samples_per_second"} <= set(training[0])
    assert [line["step"] for line in lines if line.get("test_accuracy", -1) >= 0] == [6]
    _check_loads_in_transformers(folder / "best")
    _check_loads_in_transformers(folder / "last")


def test_mixture(python: Path, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """Two sets, of which one has the folder's validation data and one has columns of its own."""
    rows = [json.loads(line) for line in (small_data / "train.jsonl").read_text().splitlines()]
    other = [
        {"a": row["sentence1"], "b": row["sentence2"], "is_more": row["label"]} for row in rows
    ]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    columns = {"text": "a", "text_pair": "b", "label": "is_more"}
    sets = [{"path": str(small_data), "weight": 2},
            {"path": "other.jsonl", "columns": columns, "weight": 1, "cap": 30}]  # fmt: skip
    (tmp_path / "mixture.yaml").write_text(json.dumps(sets))
    done = subprocess.run(
        ["bash", str(EXAMPLES / "mixture.sh"), "--save", "run", "--log-interval", "1",
         "--metric-for-best-model", f"eval_{small_data.name}_loss"],
        env={**os.environ, "MODEL": str(small_model), "MIXTURE": "mixture.yaml",
             "PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, cwd=tmp_path, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("33.3 % = 30 samples, 1.00 epochs of 30 rows") == 2, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    name = small_data.name
    assert {"loss", f"{name}_loss", "other_loss"} <= lines[0].keys()
    assert any({"eval_loss", f"eval_{name}_accuracy"} <= line.keys() for line in lines)
    tested = next(line for line in lines if "test_loss" in line)
    assert tested[f"test_{name}_loss"] == tested["test_loss"]  # the other set has no test data


def _check_loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = model(**tokenizer("w1 w2", "w3", return_tensors="pt")).logits
    assert logits.shape == (1, 2)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "BertForSequenceClassification"
    ]


@TWO
def test_finetuner(
    processes: int, rapidformer: Any, small_model: Path, even_data: Path, tmp_path: Path
) -> None:
    done = rapidformer(
        "--user-script", EXAMPLES / "finetuner.py", "--task", "sequence_classification",
        *_common(small_model, even_data, processes), "--global-batch-size", 32,
        "--mixed-precision", "--zero-3-memory-optimization", "--onnx-runtime-training",
        "--compile-backend", "eager", "--save", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_accuracy" in line]
    assert [line["step"] for line in evaluations] == [4, 8]
    assert {"eval_accuracy", "eval_f1"} <= set(evaluations[-1])
    assert (tmp_path / "run" / "best" / "config.json").is_file()


@TWO
def test_custom_loop(processes: int, rapidformer: Any, small_model: Path, small_data: Path) -> None:
    """The documents' loop without a template; its schedule's length follows from --epochs."""
    done = rapidformer(
        "--user-script", EXAMPLES / "custom_loop.py",
        *_common(small_model, small_data, processes), "--zero-1-memory-optimization",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 0: {'accuracy'") == 1, "only the first process prints"
    assert "epoch 1: {'accuracy'" in done.stdout


@TWO
def test_engine_loop(processes: int, rapidformer: Any, small_model: Path, small_data: Path) -> None:
    done = rapidformer(
        "--user-script", EXAMPLES / "engine_loop.py",
        *_common(small_model, small_data, processes), "--mixed-precision",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss 0." in done.stdout


def test_engine_loop_under_torchs_older_launcher(
    python: Path, small_model: Path, small_data: Path
) -> None:
    """It adds ``--local-rank`` to the command line; ``torchrun`` itself is in tests/dialects."""
    done = subprocess.run(
        [python, "-m", "torch.distributed.launch", "--nproc_per_node", "2",
         "--master_port", str(find_free_port()), str(EXAMPLES / "engine_loop.py"),
         *map(str, _common(small_model, small_data, 2)), "--local_rank=0"],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1: loss") == 1


def test_pretraining_from_the_standard_library(python: Path, tmp_path: Path) -> None:
    """Corpus, tokenizer, files, black box and script in miniature: the same losses from both."""
    done = subprocess.run(
        [python, str(EXAMPLES / "pretraining" / "run.py"), "--small", "--steps", "12",
         "--output", str(tmp_path)],
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "$ rapidformer preprocess" in done.stdout
    assert "largest difference between the two runs  0.00e+00" in done.stdout
    assert "unigram entropy of the held-out part" in done.stdout


def run_commands_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an example run its commands in this process, which has imported everything."""
    run_really = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[0] != "rapidformer":  # such as nvidia-smi
            return run_really(command, **options)
        monkeypatch.chdir(options["cwd"])
        assert main(command[1:]) == 0
        return None

    monkeypatch.setattr(subprocess, "run", run)


def test_preference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A toy preference is learnt: from chance to nearly always, on pairs that were held out."""
    folder = tmp_path / "out"
    namespace = runpy.run_path(str(EXAMPLES / "preference.py"))
    monkeypatch.setattr(sys, "argv", ["preference.py", str(folder)])
    run_commands_here(monkeypatch)
    namespace["main"]()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    accuracies = [json.loads(line).get("eval_rewards/accuracies") for line in lines]
    first, *_, last = [accuracy for accuracy in accuracies if accuracy is not None]
    assert 0.35 < first < 0.65
    assert last > 0.9
    assert f"{first:.0%} before training, {last:.0%} after it" in capsys.readouterr().out


def test_streaming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows that follow a resume are those of the unbroken run, and so are the losses."""
    runpy.run_path(str(EXAMPLES / "streaming.py"))["main"](tmp_path)
    assert "accuracy 1.000\nsame losses after a resume: True" in capsys.readouterr().out


def test_image_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pictures of shapes: an epoch teaches it the form of an answer, and one is described."""
    folder = tmp_path / "out"
    namespace = runpy.run_path(str(EXAMPLES / "image_text.py"))
    monkeypatch.setattr(sys, "argv", ["image_text.py", str(folder), "--epochs", "1"])
    run_commands_here(monkeypatch)
    namespace["main"]()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert losses[0] > 2.5
    assert losses[-1] < 2
    assert '"generated": "a ' in capfd.readouterr().out


def test_distillation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The student learns from its teacher alone."""
    namespace = runpy.run_path(str(EXAMPLES / "distillation.py"))
    namespace["main"](tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    change = {words[0]: (float(words[1]), float(words[3])) for words in lines if "->" in words}
    assert change["divergence_loss"][0] > 2 and change["divergence_loss"][1] < 0.2
    assert change["accuracy"][0] < 0.1 and change["accuracy"][1] > 0.85


def test_embeddings_find_functions(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In miniature: many more functions are found than by chance, and more with each evaluation."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    main = runpy.run_path(str(EXAMPLES / "embeddings" / "run.py"))["main"]
    written: list[str] = []

    def run(*words: str) -> None:
        done = command(*words)
        assert done.returncode == 0, done.stderr

    monkeypatch.setitem(main.__globals__, "run", run)
    monkeypatch.setitem(main.__globals__, "print", lambda *a, **k: written.extend(map(str, a)))
    main(["--pairs", "600", "--steps", "12", "--output", str(tmp_path)])
    shown = "\n".join(written)
    starts = ("by chance", "after")
    lines = [line for line in shown.splitlines() if line.startswith(starts)]
    chance, *steps = [float(line.split()[-1].removesuffix("%")) for line in lines]
    assert steps[-1] > max(steps[0], 3 * chance), shown
    assert "Return the size of a file." in shown
