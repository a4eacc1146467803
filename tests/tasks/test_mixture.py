"""Mixtures under tasks: other columns in each set, the loss of each set, evaluation by set."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from rapidformer.config import Settings
from rapidformer.data.mixture import choose_sets
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.mixture import SetTallies, prepare_data
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from tests.processes import run_in_kept_processes
from tests.tasks.conftest import write_jsonl
from tests.tasks.preference_rig import LEARNING_RATE, WORDS, Recorder, make_model, make_pairs

_LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 2, "zero_3_memory_optimization": True},
    {"micro_batch_size": 4, "tensor_model_parallel_size": 2},
    {"micro_batch_size": 4, "pipeline_model_parallel_size": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, plain texts, prompts with answers, and pairs."""
    path = tmp_path_factory.mktemp("mixture")
    make_model(path / "model")
    texts = [" ".join(WORDS[n % 7 : n % 7 + 2 + n % 5]) for n in range(12)]
    write_jsonl(path / "a.jsonl", [{"body": text} for text in texts])
    chats = [{"prompt": WORDS[n], "response": " ".join(WORDS[n:][: n + 1])} for n in range(5)]
    write_jsonl(path / "b.jsonl", chats)
    write_jsonl(path / "c.jsonl", make_pairs(6))
    write_jsonl(path / "d.jsonl", make_pairs(4, seed=1))
    (path / "mix.yaml").write_text(
        "- {path: a.jsonl, weight: 2, columns: {text: body}}\n- {path: b.jsonl, weight: 1}\n",
        encoding="utf-8",
    )
    return path


def get_settings(folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "task": "causal_lm", "data_path": str(folder / "mix.yaml"), "chat_template": "none",
        "pretrained_model_name_or_path": str(folder / "model"), "optimizer": "sgd",
        "sgd_momentum": 0.0, "weight_decay": 0.0, "lr": LEARNING_RATE, "clip_grad": 0.0,
        "lr_decay_style": "constant", "epochs": 2, "save": "none", "log_interval": 1,
        "progress": False, "log_level": "error", "seq_length": 64, "group_texts": False,
        "global_batch_size": 8, "device": "cpu", **settings,
    }  # fmt: skip


def run(folder: Path, **settings: Any) -> tuple[Recorder, dict[str, float]]:
    engine = RapidformerEngine(args=get_settings(folder, **settings))
    recorder = Recorder()
    finetuner = TaskFinetuner(engine, get_task(engine.args.task or ""))
    finetuner.callbacks = [recorder]
    try:
        return recorder, finetuner.train()
    finally:
        engine.close(gives_back=False)


def run_bare(folder: Path) -> Recorder:
    """A plain loop over the rows of the sets."""
    from transformers import AutoModelForCausalLM

    args = Settings(**get_settings(folder))
    rows: Any = prepare_data(get_task("causal_lm"), args)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    recorder = Recorder()
    for epoch in range(2):
        numbers = rows.train.sets.list_numbers(args.seed, epoch, shuffles=True).tolist()
        for start in range(0, len(numbers), 8):
            losses: dict[int, list[torch.Tensor]] = {0: [], 1: []}
            for number in numbers[start : start + 8]:
                row = rows.train[number]
                ids = torch.tensor([row["input_ids"]])
                labels = torch.tensor(row.get("labels", row["input_ids"]))
                logits = model(input_ids=ids).logits[0, :-1]
                terms = functional.cross_entropy(logits, labels[1:], reduction="none")
                losses[rows.train.sets.find(number)] += terms[labels[1:] != -100]
            loss = torch.stack(losses[0] + losses[1]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of_sets = {
                f"{name}_loss": float(torch.stack(losses[number]).mean())
                for number, name in enumerate("ab")
                if losses[number]
            }
            recorder.lines.append({"loss": float(loss), **of_sets})
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            recorder.weights.append(weights)
    return recorder


def check_equal(result: Recorder, expected: Recorder, steps: int = 4) -> None:
    """15 samples are two updates an epoch."""
    assert len(result.lines) == len(result.weights) == steps
    for line, wanted in zip(result.lines, expected.lines, strict=False):
        found = {name: line[name] for name in ("loss", "a_loss", "b_loss") if name in line}
        assert found == pytest.approx(wanted, abs=2e-6)
    for weights, wanted_weights in zip(result.weights, expected.weights, strict=False):
        for name, weight in weights.items():
            assert float((weight - wanted_weights[name]).abs().max()) < 5e-7, name


@pytest.fixture(scope="module")
def expected(folder: Path) -> Recorder:
    return run_bare(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 8, "num_workers": 0},
        {"micro_batch_size": 2, "fused_loss": "on"},
        {"micro_batch_size": 1, "num_workers": 2},
    ],
)
def test_parity_with_a_bare_loop(
    folder: Path, expected: Recorder, settings: dict[str, Any]
) -> None:
    check_equal(run(folder, **settings)[0], expected)


def run_layouts(folder: Path) -> list[Recorder]:
    return [run(folder, train_iters=2, **settings)[0] for settings in _LAYOUTS]


@pytest.mark.slow
def test_layouts_change_nothing(folder: Path, expected: Recorder) -> None:
    for results in run_in_kept_processes(run_layouts, 2, folder):
        for result in results:
            check_equal(result, expected, steps=2)


def test_pairs_have_losses_by_set(folder: Path) -> None:
    paths = [str(folder / "c.jsonl"), str(folder / "d.jsonl")]
    settings = {"task": "preference", "data_path": paths, "data_weights": [1.0, 1.0]}
    recorder, _ = run(folder, **settings, epochs=1, micro_batch_size=2)
    for line in recorder.lines:
        assert line["loss"] == pytest.approx((line["c_loss"] + line["d_loss"]) / 2, abs=1e-6)


def test_a_loss_with_other_parts_is_not_split(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, _ = run(folder, micro_batch_size=8, label_smoothing=0.3, log_level="warning")
    assert "a_loss" not in recorder.lines[0]
    assert "the loss of each data set is not shown" in caplog.text


# ---- classes and evaluation ----------------------------------------------------------------------


def write_reviews(folder: Path, names: dict[str, list[Any]]) -> list[str]:
    for name, labels in names.items():
        rows = [{"text": f"good movie {n}", f"label_{name}": labels[n % len(labels)]}
                for n in range(10)]  # fmt: skip
        write_jsonl(folder / f"{name}.jsonl", rows)
    sets = [{"path": f"{name}.jsonl", "columns": {"label": f"label_{name}"}} for name in names]
    (folder / "mix.yaml").write_text(json.dumps(sets), encoding="utf-8")
    return [str(folder / "mix.yaml")]


def prepare(folder: Path, bert: Path, names: dict[str, list[Any]]) -> Any:
    args = Settings(
        task="sequence_classification", data_path=write_reviews(folder, names),
        pretrained_model_name_or_path=str(bert), validation_split=0.2,
    )  # fmt: skip
    return prepare_data(get_task("sequence_classification"), args)


def test_classes_are_joined_by_name(tmp_path: Path, bert_folder: Path) -> None:
    prepared = prepare(tmp_path, bert_folder, {"x": ["pos", "neg"], "y": ["neutral", "pos"]})
    assert prepared.extras["names"] == ("neg", "neutral", "pos")
    assert {row["labels"] for row in prepared.parts["x"].train} == {0, 2}
    assert {row["labels"] for row in prepared.parts["y"].train} == {1, 2}
    numbered = prepare(tmp_path, bert_folder, {"x": [0, 1], "y": [2, 0]})
    assert numbered.model_settings["num_labels"] == 3


def test_streams_have_their_own_columns_and_join_classes(tmp_path: Path, bert_folder: Path) -> None:
    names = {"x": ["pos", "neg"], "y": ["neutral", "pos"]}
    write_reviews(tmp_path, names)
    sets = [{"path": f"{n}.jsonl", "columns": {"label": f"label_{n}"}, "weight": 1} for n in names]
    (tmp_path / "mix.yaml").write_text(json.dumps(sets), encoding="utf-8")
    settings = {
        "task": "sequence_classification", "data_path": [str(tmp_path / "mix.yaml")],
        "pretrained_model_name_or_path": str(bert_folder), "streaming": True, "train_iters": 3,
        "chat_template": None, "group_texts": True, "epochs": None, "micro_batch_size": 4,
        "valid_data": [str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl")],
    }  # fmt: skip
    prepared: Any = prepare_data(get_task("sequence_classification"), Settings(**settings))
    assert prepared.extras["names"] == ("neg", "neutral", "pos")
    assert {row["labels"] for row in prepared.train.head[:10]} == {0, 2}
    assert {row["labels"] for row in prepared.train.head[10:]} == {1, 2}
    recorder, metrics = run(tmp_path, **settings)
    for start, line in zip((0, 8, 16), recorder.lines, strict=False):
        share = choose_sets([1, 1], Settings().seed, start, 8).mean()
        wanted = (1 - share) * line["x_loss"] + share * line["y_loss"]
        assert line["loss"] == pytest.approx(wanted, abs=1e-6)
    assert metrics["loss"] == pytest.approx((metrics["x_loss"] + metrics["y_loss"]) / 2)


def test_tags_are_joined_by_name(tmp_path: Path, bert_folder: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"tokens": ["john", "runs"], "tags": ["B-PER", "O"]}] * 3)
    write_jsonl(tmp_path / "y.jsonl", [{"words": ["paris"], "ner": ["B-LOC"]}] * 3)
    args = Settings(
        task="ner", data_path=[str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl#2")],
        pretrained_model_name_or_path=str(bert_folder),
    )  # fmt: skip
    prepared: Any = prepare_data(get_task("ner"), args)
    assert prepared.extras["names"] == ("B-LOC", "B-PER", "O")
    assert [[n for n in row["labels"] if n >= 0] for row in prepared.train] == [
        [1, 2], [1, 2], [1, 2], [0], [0],
    ]  # fmt: skip


def test_items_of_all_sets_fit_into_a_batch(bert_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"query": "cat", "positive": "dog"}] * 2)
    rows = [{"anchor": "red", "positive": "blue", "negative": ["one", "two"]}] * 2
    write_jsonl(tmp_path / "y.jsonl", rows)
    args = Settings(
        task="embedding", data_path=[str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl")],
        data_weights=[1.0, 1.0], pretrained_model_name_or_path=str(bert_folder),
    )  # fmt: skip
    prepared: Any = prepare_data(get_task("embedding"), args)
    # Also a batch of the first set alone: those of an update must have one shape.
    assert prepared.collate([prepared.train[0]])["slots"].tolist() == [[0, 1, -1, -1]]


class Counted(Tally):
    """A metric that is a mean over examples, and one that is not."""

    def add(self, records: Any) -> None:
        """Nothing but the examples, which every tally counts."""

    def score(self) -> dict[str, float]:
        return {"perplexity": -1.0, "bleu": -1.0, "f1": float(self.examples)}


def test_metrics_of_tallies_that_read_rows() -> None:
    task: Any = SimpleNamespace(tally_reads_rows=True, build_tally=lambda part, split: Counted())
    part: Any = SimpleNamespace(get_split=lambda split: [])
    prepared: Any = SimpleNamespace(parts={"a": part, "b": part})
    tallies = SetTallies(task, prepared, "validation")
    tallies.update("a", [{"loss": 3.0, "count": 2}])
    tallies.update("b", [{"loss": 5.0, "count": 1}, {"loss": 0.0, "count": 1}])
    found = tallies.compute()
    assert found["loss"] == 2.0 and found["a_loss"] == 1.5 and found["b_loss"] == 2.5
    assert found["f1"] == pytest.approx((1 * 1 + 2 * 2) / 3)
    assert found["perplexity"] == pytest.approx(math.exp(2.0))
    assert "bleu" not in found and "a_bleu" in found


def test_names_and_numbers_are_refused(tmp_path: Path, bert_folder: Path) -> None:
    with pytest.raises(DataError, match=r"x has labels with names \(neg, pos\) and y has numbers"):
        prepare(tmp_path, bert_folder, {"x": ["pos", "neg"], "y": [0, 1]})
    with pytest.raises(DataError, match="the sets need different models: problem_type"):
        prepare(tmp_path, bert_folder, {"x": [0.5, 1.5], "y": [0, 1]})


def test_evaluation_by_set_and_in_total(tmp_path: Path, bert_folder: Path) -> None:
    paths = write_reviews(tmp_path, {"x": ["pos", "neg"], "y": ["neutral", "pos", "neg"]})
    settings = {
        "task": "sequence_classification", "data_path": paths, "validation_split": 0.4,
        "pretrained_model_name_or_path": str(bert_folder), "chat_template": None,
        "group_texts": True, "epochs": 1, "micro_batch_size": 4, "eval_micro_batch_size": 3,
    }  # fmt: skip
    _, metrics = run(tmp_path, **settings)
    assert metrics["loss"] == pytest.approx((metrics["x_loss"] + metrics["y_loss"]) / 2)
    both = metrics["x_accuracy"] + metrics["y_accuracy"]
    assert metrics["accuracy"] == pytest.approx(both / 2)
