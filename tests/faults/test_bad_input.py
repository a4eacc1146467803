"""Bad input: one clear error each, no traceback, nothing written over."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.small import make_pair_data


def _train(model: Path, data: Path, *more: object) -> list[object]:
    return [
        "--task", "sequence_classification", "--pretrained-model-name-or-path", model,
        "--data-path", data, "--epochs", 1, "--micro-batch-size", 8, *more,
    ]  # fmt: skip


def _check(done: Any, *parts: str) -> None:
    """It failed, and standard error ends with one error that holds all the parts."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    for part in parts:
        assert part in message, message


def test_unknown_flags_are_reported_all_at_once(command: Any) -> None:
    done = command("--task", "sequence_classification", "--epoch", "3", "--lrr=1")
    _check(done, "--epoch: did you mean --epochs?", "--lrr: did you mean --lr?")


def test_unknown_task(command: Any) -> None:
    _check(command("--task", "sequence_clasification"), "Did you mean sequence_classification")


def test_unknown_command(command: Any) -> None:
    _check(command("evalute"), "Did you mean evaluate?")


def test_nothing_to_train(command: Any) -> None:
    _check(command("--epochs", 3), "--task", "--user-script")


def test_misspelt_column(command: Any, small_model: Path, small_data: Path) -> None:
    done = command(*_train(small_model, small_data, "--text-column", "sentense1"))
    _check(done, "sentense1", "sentence1")


def test_no_column_of_a_known_name(command: Any, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"body": "w1", "label": 0}\n{"body": "w2", "label": 1}\n'
    )
    done = command(*_train(small_model, tmp_path / "train.jsonl"))
    _check(done, "body", "--text-column")


def test_empty_file(command: Any, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("")
    _check(command(*_train(small_model, tmp_path / "data")), "train.jsonl", "empty")


def test_rows_with_more_cells_than_columns(command: Any, small_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("sentence,label\nw1,0\nw2, w3,1\n")
    _check(command(*_train(small_model, path)), "line 3 has 3 cells for 2 columns")


def test_malformed_json_has_its_line_number(
    command: Any, small_model: Path, tmp_path: Path
) -> None:
    rows = '{"sentence": "w1", "label": 0}\n{"sentence": "w2", "label": \n'
    (tmp_path / "train.jsonl").write_text(rows)
    _check(command(*_train(small_model, tmp_path / "train.jsonl")), "line 2")


def test_labels_out_of_range(command: Any, small_model: Path, tmp_path: Path) -> None:
    data = make_pair_data(tmp_path / "data")
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    rows[4]["label"] = 7
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command(*_train(small_model, data, "--num-labels", 2))
    _check(done, "7", "row 5")


def test_batch_size_that_does_not_divide(command: Any, small_model: Path, small_data: Path) -> None:
    done = command(*_train(small_model, small_data, "--global-batch-size", 20))
    _check(done, "--global-batch-size 20", "use 16 or 24")


def test_missing_data_folder(command: Any, small_model: Path, tmp_path: Path) -> None:
    _check(command(*_train(small_model, tmp_path / "nowhere")), "nowhere")


def test_missing_model_folder(command: Any, small_data: Path, tmp_path: Path) -> None:
    _check(command(*_train(tmp_path / "no-model", small_data)), "no-model")


def test_missing_hub_model_and_data_without_network(command: Any, small_data: Path) -> None:
    done = command(*_train(Path("some-org/some-bert"), small_data))
    _check(done, "some-org/some-bert")
    assert len(done.stderr.splitlines()) < 6


def test_missing_checkpoint_folder(
    command: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    done = command(*_train(small_model, small_data, "--load", tmp_path / "no-run"))
    _check(done, "no-run", "no such folder")


def test_a_run_is_not_written_over(
    command: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert command(*_train(small_model, small_data, "--save", folder)).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    _check(command(*_train(small_model, small_data, "--save", folder)), "already holds a run")
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    done = command(*_train(small_model, small_data, "--save", folder, "--overwrite"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--num-gpus", "--nnodes"])
def test_no_processes_at_all(
    flag: str, command: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    _check(command(*_train(small_model, small_data, flag, 0)), "must be at least 1, got 0")
    (tmp_path / "script.py").write_text("")
    _check(command("--user-script", tmp_path / "script.py", flag, 0), "must be at least 1, got 0")


DOCUMENTS = {
    "numbers": ("1\n2\n3\n", "each row must be a JSON object"),
    "number": ("1", "each row must be a JSON object"),
    "brackets": ("[" * 100_000, "nested too deeply"),
    "braces": ('{"a": ' * 100_000, "line 1: not valid JSON (it is nested too deeply)"),
    "digits": ('{"text": "a", "label": ' + "9" * 5000 + "}", "not valid JSON (Exceeds the limit"),
    "squad": ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "is not in SQuAD's format: KeyError"),
    "articles": ('{"data": [{"paragraphs": 3}]}', "is not in SQuAD's format: TypeError"),
    "surrogate": ('{"text": "\\ud800", "label": 0}\n', "do not form a table"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_malformed_rows(name: str, command: Any, small_model: Path, tmp_path: Path) -> None:
    text, message = DOCUMENTS[name]
    (tmp_path / "train.jsonl").write_text(text)
    model = ["--task", "sequence_classification", "--load", small_model]
    _check(command(*_train(small_model, tmp_path / "train.jsonl")), message)
    _check(command("evaluate", *model, "--data-path", tmp_path / "train.jsonl"), message)
    _check(command("predict", *model, "--data-path", tmp_path / "train.jsonl"), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\udcff", "holds bytes that are not UTF-8"),
        ('{"text": "\\ud800"}', "holds bytes that are not UTF-8"),
        ('{"text": ' + "[" * 100_000, "it is nested too deeply"),
        ('{"text": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
    ids=["bytes", "surrogate", "nested", "digits"],
)
def test_malformed_input(text: str, message: str, command: Any, small_model: Path) -> None:
    model = ["--task", "sequence_classification", "--load", small_model]
    _check(command("predict", *model, "--input", text), message)


@pytest.mark.parametrize("flag", ["--data-path", "--load", "--save", "--output", "--input"])
def test_the_home_of_nobody(flag: str, command: Any, small_model: Path, small_data: Path) -> None:
    model = ["--task", "sequence_classification", "--pretrained-model-name-or-path", small_model]
    predicts = flag in ("--output", "--input")
    words = ["predict", *model, "--input", "w1"] if predicts else _train(small_model, small_data)
    done = command(*words, flag, "~nosuchuser/x.jsonl")
    _check(done, "a user who is not on this machine")


@pytest.mark.parametrize("name", ["runs", "check", "export", "plot", "launch"])
def test_a_name_that_no_file_can_have(name: str, command: Any) -> None:
    _check(command(name, "a" * 5000, *["out"] * (name == "export")), "File name too long")


WRONG_TYPES = '{"processes": "1", "nodes": 1, "node_rank": 0, "master_addr": "a", "master_port": 1}'


@pytest.mark.parametrize("text", ["", "{", "{}", "[" * 100_000, '{"processes": 1}', WRONG_TYPES])
def test_a_variable_of_the_launchers_own(
    text: str, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAPIDFORMER_NODE", text)
    (tmp_path / "script.py").write_text("")
    done = command("--user-script", tmp_path / "script.py")
    assert done.returncode and "Traceback" not in done.stderr
    assert "RAPIDFORMER_NODE is" in done.stderr and "unset it" in done.stderr


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": float("nan")}, {"num_hidden_layers": "two"}, {"num_hidden_layers": 10**40},
        {"num_attention_heads": 0}, {"vocab_size": None}, {"vocab_size": -3},
        {"max_position_embeddings": [1]}, {"hidden_act": "nothing"}, {"id2label": 3},
        {"architectures": 3}, {"model_type": 3}, {"layer_norm_eps": {}},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_configuration_with_a_wrong_field(
    changes: dict[str, Any], command: Any, small_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    _change_config(model, **changes)
    done = command("predict", "--task", "sequence_classification", "--load", model, "--input", "w1")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1, changes


@pytest.mark.parametrize("text", ['{"model_type": "be', "[" * 100_000, "3", "\0"])
def test_a_configuration_that_is_none(
    text: str, command: Any, small_model: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    (model / "config.json").write_text(text)
    _check(command("predict", "--load", model, "--input", "w1"), "predict needs --task")
    words = ["--task", "sequence_classification", "--load", model, "--input", "w1"]
    _check(command("predict", *words), str(model))


def test_a_program_in_place_of_weights(command: Any, small_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(_Program(str(tmp_path / "ran"))))
    words = ["--task", "sequence_classification", "--load", model, "--input", "w1"]
    _check(command("predict", *words), f"of {model} cannot be loaded")
    assert not (tmp_path / "ran").exists()


class _Program:
    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return open, (self._file, "w")


def test_a_checkpoint_whose_run_file_is_cut(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "iter_0000001"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"step": 1, "ba')
    words = ["--task", "sequence_classification", "--load", tmp_path / "run", "--input", "w1"]
    _check(command("predict", *words), "run.json is missing or unreadable")


NAN_SCRIPT = """
import torch
from rapidformer import Finetuner, RapidformerEngine
from transformers import BertConfig, BertForSequenceClassification

class Breaks(Finetuner):
    calls = 0
    def train_valid_test_datasets_provider(self):
        rows = [{"input_ids": [1, 2, 3], "labels": i % 2} for i in range(80)]
        return rows, None, None, None
    def model_optimizer_lr_scheduler_provider(self):
        config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1,
                            num_attention_heads=1, intermediate_size=8)
        return BertForSequenceClassification(config), None, None
    def run_forward_step(self, batch, model):
        self.calls += 1
        loss = model(**batch).loss
        return loss * float("nan") if self.calls == 7 else loss

Breaks(RapidformerEngine()).train()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_a_number(processes: int, rapidformer: Any, tmp_path: Path) -> None:
    """Found with its exact step though nobody looked at that step; no later state is saved."""
    script = tmp_path / "breaks.py"
    script.write_text(NAN_SCRIPT)
    done = rapidformer(
        "--user-script", script, "--epochs", 1, "--micro-batch-size", 4, "--lr", 1e-3,
        "--save", tmp_path / "run", "--save-interval", 5, "--log-interval", 100,
        "--nproc-per-node", processes,
    )  # fmt: skip
    _check(done, "nan", "step 7")
    saved = sorted(p.name for p in (tmp_path / "run").glob("iter_*"))
    assert saved == ["iter_0000005"]
    assert not (tmp_path / "run" / "last").exists()


def test_a_script_that_does_not_exist(command: Any) -> None:
    _check(command("--user-script", "nowhere.py"), "nowhere.py is not a file")


def test_a_template_without_a_hook(command: Any, tmp_path: Path) -> None:
    script = tmp_path / "empty.py"
    script.write_text(
        "from rapidformer import Finetuner, RapidformerEngine\n"
        "Finetuner(RapidformerEngine()).train()\n"
    )
    _check(command("--user-script", script), "train_valid_test_datasets_provider")


def test_a_mistyped_run_to_resume_is_not_a_fresh_start(
    command: Any, small_model: Path, small_data: Path
) -> None:
    done = command(*_train(small_model, small_data, "--load", "runs/mrcp"))
    _check(done, "--load runs/mrcp", "no such folder")


def test_output_into_a_folder_that_is_not_there(command: Any, small_model: Path) -> None:
    done = command(
        "predict", "--task", "sequence_classification", "--load", small_model,
        "--input", "w1", "--output", "nowhere/predictions.jsonl",
    )  # fmt: skip
    _check(done, "nowhere")
