"""A run resumed with another batch size, data, seed or model: nothing is lost, and it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer.training.template import Template
from tests.processes import run_in_kept_processes
from tests.training.test_templates import LineFinetuner, make_engine, make_rows


class Records(LineFinetuner):
    """Keeps the samples that it was trained on."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.seen: list[float] = []

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.seen += batch["labels"].tolist()
        return model(**batch)


def train(folder: Path, **settings: Any) -> Records:
    values = {"epochs": 1, "save": str(folder), "lr_decay_style": "linear", **settings}
    template = Records(make_engine(**values))
    template.train()
    return template


def train_on_two(folder: Path, settings: dict[str, Any]) -> tuple[list[float], int, float]:
    done = train(folder, **settings)
    return done.seen, done.engine.updates.clock.updates, done.engine.updates.get_learning_rate()


@pytest.mark.parametrize("processes", [1, 2])
def test_another_batch_size_trains_on_every_sample_once(processes: int, tmp_path: Path) -> None:
    """12 of 40 samples are done; the other 28 follow in 4 steps of 8, and the rate falls to 0."""
    first = train(tmp_path, exit_interval=3)
    settings = {"load": str(tmp_path), "micro_batch_size": 8 // processes, "log_level": "error"}
    if processes == 1:
        results = [train_on_two(tmp_path, settings)]
    else:
        results = run_in_kept_processes(train_on_two, 2, tmp_path, settings)
    seen = [sample for samples, _, _ in results for sample in samples]
    # A rank without samples in the last round repeats one, with weight 0.
    assert set(seen) == {float(row["labels"]) for row in make_rows(40)} - set(first.seen)
    assert {(steps, rate) for _, steps, rate in results} == {(7, 0.0)}


def test_the_same_batch_size_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path, exit_interval=3)
    resumed = train(tmp_path, load=str(tmp_path))
    assert (resumed.engine.updates.clock.updates, len(resumed.seen)) == (10, 28)


def test_steps_given_in_steps_stay_steps(tmp_path: Path) -> None:
    train(tmp_path, exit_interval=3, train_iters=9)
    resumed = train(tmp_path, load=str(tmp_path), train_iters=9, micro_batch_size=8)
    assert resumed.engine.updates.clock.updates == 9


# ---- what differs is reported ------------------------------------------------------------------


class Heads(nn.Module):
    """As wide with 2 heads as with 4: the weights fit both."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.config = type("Config", (), {"num_attention_heads": heads})()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((self.layer(x).squeeze(-1) - labels) ** 2).mean()


class Changeable(LineFinetuner):
    rows, heads, shuffles = 40, 2, True

    @property
    def is_shuffled(self) -> bool:
        return self.shuffles

    def train_valid_test_datasets_provider(self) -> Any:
        return make_rows(self.rows), None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return Heads(self.heads), None, None


SAVED = {"seed": 3, "seq_length": 16, "train_data": ["a/corpus.jsonl"]}


@pytest.mark.parametrize(
    ("settings", "changes", "sentences"),
    [
        ({}, {}, []),
        ({"train_data": ["b/corpus.jsonl"]}, {}, []),
        ({"seed": 4}, {}, ["seed 4 (was 3): dropout", "data seed 4 (was 3): the samples come in"]),
        ({"seq_length": 32}, {}, ["sequence length 32 (was 16): samples are cut differently"]),
        (
            {"train_data": ["other.jsonl"]},
            {},
            ["data other.jsonl (was corpus.jsonl): the position"],
        ),
        ({}, {"rows": 44}, ["samples 44 (was 40): the position in the old data"]),
        ({}, {"heads": 4}, ["attention heads 4 (was 2): the same weights compute something else"]),
        ({}, {"shuffles": False}, ["order as stored (was shuffled): some samples"]),
        ({"micro_batch_size": 8}, {}, ["global batch 8 (was 4): the very next sample follows"]),
    ],
)
def test_what_differs_from_the_checkpoint_is_reported(
    settings: dict[str, Any],
    changes: dict[str, Any],
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(kind: type[Template], **more: Any) -> None:
        values = {"save": str(tmp_path), "epochs": 1, "log_level": "warning", **SAVED, **more}
        kind(make_engine(**values)).train()

    start(Changeable, exit_interval=2)
    capsys.readouterr()
    start(type("Changed", (Changeable,), changes), load=str(tmp_path), **settings)
    text = capsys.readouterr().err
    assert text.count("  - ") == len(sentences), text
    for sentence in sentences:
        assert f"  - {sentence}" in text
    assert ("resumed with other settings than" in text) == bool(sentences)


def test_a_checkpoint_without_optimizer_state_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, exit_interval=3, save_optim=False)
    capsys.readouterr()
    train(tmp_path, load=str(tmp_path), log_level="warning")
    assert "saved without optimizer state: the optimizer starts from scratch" in (
        capsys.readouterr().err
    )
