"""The loop == a bare PyTorch loop; same seed == same losses; resumed == uninterrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.data.collate import PadCollator
from rapidformer.optim.optimizers import group_parameters
from tests.parity.models import build_model, build_rows
from tests.processes import run_in_kept_processes

MICRO = 4
ROWS = 28
"""An epoch of seven updates in one process, and of four in two."""
STEPS = 9  # the second epoch has begun
RATE = 2e-3
WARM_UP = 5


class HarnessFinetuner(Finetuner):
    """A template over the parity harness's models and rows."""

    model_name = "small-bert"
    dropout = 0.0

    def train_valid_test_datasets_provider(self) -> Any:
        rows = build_rows(self.model_name, ROWS)
        return rows, rows[:9], None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return build_model(self.model_name, self.dropout), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        losses = [self.gather(model[0](**batch).loss.reshape(1)) for batch in eval_dataloader]
        return {"loss": float(torch.cat(losses).mean())}


class DropoutFinetuner(HarnessFinetuner):
    dropout = 0.1


def read_losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def run_template(cls: type[Finetuner], **settings: Any) -> list[float]:
    values = {"micro_batch_size": MICRO, "lr": RATE, "log_interval": 1, "log_level": "error"}
    engine = RapidformerEngine(args={**values, **settings})
    cls(engine).train()
    engine.close()
    return read_losses(Path(settings["save"]))


def run_bare_loop(model_name: str) -> list[float]:
    """Written against torch alone, over the samples in the loop's order."""
    engine = RapidformerEngine(args={"micro_batch_size": MICRO, "seed": 11})
    order = engine.data.build_loader(list(range(ROWS)), torch.tensor, shuffle=True)
    model, rows, collate = build_model(model_name), build_rows(model_name, ROWS), PadCollator()
    optimizer = torch.optim.AdamW(group_parameters(model, 0.01), lr=RATE)
    scheduler = LambdaLR(
        optimizer,
        lambda step: min(step / WARM_UP, (STEPS - step) / (STEPS - WARM_UP)),
    )
    losses: list[float] = []
    model.train()
    while len(losses) < STEPS:
        for indices in order:
            loss = model(**collate([rows[i] for i in indices.tolist()])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return losses


@pytest.mark.parametrize("model_name", ["small-bert", "small-gpt2"])
def test_the_loop_equals_a_bare_loop(model_name: str, tmp_path: Path) -> None:
    cls = type("Named", (HarnessFinetuner,), {"model_name": model_name})
    mine = run_template(
        cls, train_iters=STEPS, lr_warmup_iters=WARM_UP, seed=11, save=str(tmp_path / "run")
    )
    bare = run_bare_loop(model_name)
    assert len(mine) == len(bare) == STEPS
    assert max(abs(a - b) / abs(b) for a, b in zip(mine, bare, strict=True)) < 1e-6


def test_the_same_seed_gives_the_same_losses(tmp_path: Path) -> None:
    runs = [
        run_template(DropoutFinetuner, epochs=1, seed=seed, save=str(tmp_path / name))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize(
    ("world_size", "updates", "switches"),
    [
        (1, 4, {"mixed_precision": "bf16", "micro_batch_size": 1, "global_batch_size": 2}),
        (1, 4, {"fp16": True, "micro_batch_size": 1}),
        (1, 8, {"optimizer": "muon"}),
        (2, 5, {"zero_1_memory_optimization": True, "micro_batch_size": 2}),
        (2, 5, {"zero_3_memory_optimization": True}),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    world_size: int, updates: int, switches: dict[str, Any], tmp_path: Path
) -> None:
    """Interrupted in the middle of an epoch, with dropout: every later loss is bit-equal.

    One update of the second epoch follows. In 16 bits there is one epoch only: some processors take
    forty times as long. Stage 1 accumulates. Plain runs are resumed in tests/cli/test_command.py;
    on two processes, in tests/faults/test_preemption.py.
    """
    settings = {"train_iters": updates, "lr_warmup_iters": 2, "seed": 3, **switches}
    whole = {**settings, "save": str(tmp_path / "whole")}
    first = {**settings, "save": str(tmp_path / "part"), "exit_interval": 2}
    second = {**settings, "save": str(tmp_path / "part"), "load": str(tmp_path / "part")}
    runs = [whole, first, second]
    losses, interrupted, resumed = (
        _run_each(runs)
        if world_size == 1
        else run_in_kept_processes(_run_each, world_size, runs)[0]
    )
    assert len(losses) == updates
    assert interrupted == losses[:2]
    assert resumed == losses


def _run_each(runs: list[dict[str, Any]]) -> list[list[float]]:
    return [run_template(DropoutFinetuner, **settings) for settings in runs]


def test_the_loop_on_two_processes_equals_one(tmp_path: Path) -> None:
    settings = {"epochs": 2, "global_batch_size": 16, "seed": 3, "optimizer": "sgd", "lr": 0.05}
    one = run_template(HarnessFinetuner, **settings, save=str(tmp_path / "one"))
    two = run_in_kept_processes(
        _run_plain_keywords, 2, {**settings, "save": str(tmp_path / "two")}
    )[0]
    assert max(abs(a - b) / abs(b) for a, b in zip(one, two, strict=True)) < 1e-6


def _run_plain_keywords(settings: dict[str, Any]) -> list[float]:
    return run_template(HarnessFinetuner, **settings)
