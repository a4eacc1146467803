"""evaluate and predict on the folder of a run, in one process."""

from __future__ import annotations

import csv
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import rapidformer
from rapidformer.cli.output import format_lines, write_predictions
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import arguments_from_mapping
from rapidformer.errors import DataError, ModelError
from rapidformer.tasks.evaluation.evaluating import EvaluationReport
from rapidformer.tasks.metrics.tally import ScoreTable
from tests.small import make_model_folder

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"r{i}", "body": f"word {i % 3}", "label": ["no", "yes"][i % 2]})
            + "\n"
            for i in range(20)
        )
    )
    return path


@pytest.fixture
def run(command: Command, rows: Path, small_model: Path, tmp_path: Path) -> Path:
    done = command(
        "--task", "sequence_classification", "--pretrained-model-name-or-path", small_model,
        "--data-path", rows, "--text-column", "body", "--validation-split", "0.25",
        "--train-iters", "2", "--micro-batch-size", "5", "--save", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "15 training, 5 evaluation samples" in done.stderr
    return tmp_path / "run"


def test_a_run_is_evaluated_and_asked_by_its_folder_alone(
    command: Command, run: Path, rows: Path, tmp_path: Path
) -> None:
    done = command("evaluate", "--load", run)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (trained,) = (line for line in lines if "eval_loss" in line)
    assert found["loss"] == pytest.approx(trained["eval_loss"], rel=1e-5), "the same rows"
    assert found["examples"] == 5 and found["seconds"] > 0
    assert "evaluated 5 examples of validation in" in done.stderr
    assert "by class" in done.stderr and "confusion matrix (rows: true" in done.stderr
    matrix = found["confusion_matrix"]
    assert matrix["labels"] == ["no", "yes"] and sum(map(sum, matrix["counts"])) == 5
    assert set(found["classes"]) >= {"macro avg", "weighted avg"}
    assert json.loads((run / "evaluation_validation.json").read_text()) == found
    (checkpoint,) = run.glob("iter_*")
    done = command("evaluate", "--load", checkpoint)
    assert json.loads(done.stdout)["loss"] == pytest.approx(found["loss"], rel=1e-6)

    done = command("evaluate", "--load", run, "--data-path", rows)
    assert json.loads(done.stdout)["split"] == "rows", done.stderr
    assert json.loads(done.stdout)["examples"] == 20, "all of the file that was asked for"
    assert json.loads((run / "evaluation_validation.json").read_text()) == found
    assert (run / "evaluation_rows.json").is_file()

    (run / "evaluation_train.json").mkdir()  # in the way: a file there cannot be written
    done = command("evaluate", "--load", run, "--eval-split", "train", "--max-eval-samples", "3")
    assert json.loads(done.stdout)["examples"] == 3 and done.returncode == 0
    assert "evaluation_train.json cannot be written: Is a directory. --output FILE" in done.stderr

    table = tmp_path / "answers.csv"
    done = command("predict", "--load", run, "--data-path", rows, "--output", table)
    assert done.returncode == 0, done.stderr
    assert f"written   20 predictions: {table}" in done.stderr
    answers = list(csv.DictReader(table.open()))
    assert [answer["id"] for answer in answers] == [f"r{i}" for i in range(20)]
    assert [answer["label"] for answer in answers] == ["no", "yes"] * 10, "the gold labels"
    assert {answer["predicted_label"] for answer in answers} <= {"no", "yes"}

    done = command("predict", "--load", run, "--task", "token_classification", "--input", "a b")
    assert done.returncode == 1
    assert "was trained for another task" in done.stderr and "--allow-untrained" in done.stderr


def test_evaluate_by_call_is_the_command(run: Path, rows: Path, tmp_path: Path) -> None:
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    report = rapidformer.evaluate(load=str(run), log_level="error")
    assert report.task == "sequence_classification" and report.examples == 5
    assert report.to_json()["loss"] == report.metrics["loss"]
    assert str(report).startswith("sequence_classification on validation: 5 examples\nmetric")
    # The same by rows and by splits.
    whole = [
        rapidformer.evaluate(data=data, load=str(run), log_level="error").metrics
        for data in (written, {"validation": written}, iter(written))
    ]
    assert whole[0] == whole[1] == whole[2] and whole[0] != report.metrics
    rapidformer.evaluate(data=written, load=str(run), output=str(tmp_path / "all.json"))
    assert json.loads((tmp_path / "all.json").read_text())["examples"] == 20
    with pytest.raises(DataError, match=r"the data has no split 'validation', only test"):
        rapidformer.evaluate(data={"test": written}, load=str(run), log_level="error")


def test_a_head_that_was_never_trained_is_refused_unless_asked_for(
    command: Command, rows: Path, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    words = ("predict", "--task", "masked_lm", "--load", folder, "--input", "w1 [MASK]")
    done = command(*words)
    assert done.returncode == 1
    assert "was never trained for this task: it has no weights for cls.predictions" in done.stderr
    assert command(*words, "--allow-untrained").returncode == 0


def test_reports_have_null_in_place_of_nan(tmp_path: Path) -> None:
    scores = {"yes": {"f1": math.nan, "support": 3}}
    report = EvaluationReport(
        task="t", split="s", metrics={"loss": math.inf, "f1": 0.5}, examples=3, seconds=1.0,
        tables=[ScoreTable(key="classes", title="by class", rows=scores, averages={})],
    )  # fmt: skip
    report.save(tmp_path / "report.json")
    for text in ((tmp_path / "report.json").read_text(), json.dumps(report.to_json())):
        found = json.loads(text, parse_constant=pytest.fail)
        assert found["loss"] is None and found["f1"] == 0.5
        assert found["classes"]["yes"] == {"f1": None, "support": 3}
    rows = [{"scores": [math.nan, {"a": -math.inf}]}]
    assert json.loads(format_lines(rows)) == {"scores": [None, {"a": None}]}


def test_predictions_have_the_type_that_the_name_says(tmp_path: Path) -> None:
    rows = [{"id": 1, "scores": [0.5]}, {"id": 2, "scores": [0.25]}]
    for name in ("p.jsonl", "p.json", "p.csv", "p.tsv", "p.parquet"):
        write_predictions(rows, tmp_path / name)
    assert json.loads((tmp_path / "p.json").read_text()) == rows
    lines = (tmp_path / "p.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert (tmp_path / "p.csv").read_text() == "id,scores\n1,[0.5]\n2,[0.25]\n"
    assert (tmp_path / "p.tsv").read_text() == "id\tscores\n1\t[0.5]\n2\t[0.25]\n"
    import datasets

    assert datasets.Dataset.from_parquet(str(tmp_path / "p.parquet"))["id"][:] == [1, 2]


def test_a_damaged_setting_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "arguments.yaml").write_text("task: causal_lm\nseq_length: many\n")
    with pytest.raises(ModelError, match=r"arguments\.yaml: seq_length "):
        choose_run_model(arguments_from_mapping({"load": str(tmp_path)}), "evaluate")


def test_a_run_that_began_with_load_has_its_model_again(tmp_path: Path) -> None:
    """`--load ADAPTER --save RUN`: a resumed run starts from that adapter, too."""
    adapter, run = tmp_path / "adapter", tmp_path / "run"
    for folder, file in ((adapter, "config.json"), (run, "arguments.yaml")):
        folder.mkdir()
        (folder / file).write_text("{}")
    (run / "arguments.yaml").write_text(f"task: causal_lm\nload: {adapter}\n")
    resumed = choose_run_model(arguments_from_mapping({"load": str(run)}), "train")
    assert resumed.load == str(run)
    assert resumed.pretrained_model_name_or_path == str(adapter)


def test_the_reference_of_an_evaluation_is_what_the_run_began_with(tmp_path: Path) -> None:
    """An adapter on a base is no bare base; a checkpoint to begin with must be named."""
    adapter, run = tmp_path / "adapter", tmp_path / "run"
    (run / "best").mkdir(parents=True)
    adapter.mkdir()
    for folder in (adapter, run / "best"):
        (folder / "config.json").write_text("{}")
    asked = arguments_from_mapping({"load": str(run)})
    for load, finetune, start in ((adapter, False, str(adapter)), (run, True, None)):
        stored = {
            "task": "preference", "pretrained_model_name_or_path": "base", "beta": 0.3,
            "load": str(load), "finetune": finetune,
        }  # fmt: skip
        (run / "arguments.yaml").write_text(json.dumps(stored))
        args = choose_run_model(asked, "evaluate")
        assert (args.pretrained_model_name_or_path, args.beta) == (start, 0.3)
        assert args.load == str(run / "best")
