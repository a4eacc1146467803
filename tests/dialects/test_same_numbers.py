"""One model, one data set, the same settings: the same losses from every front end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from rapidformer import (
    Accelerator,
    Finetuner,
    RapidformerEngine,
    Trainer,
    TrainingArguments,
    set_seed,
)
from rapidformer.config import arguments_from_mapping
from rapidformer.dialects import flagai, mindformers
from rapidformer.optim.optimizers import build_optimizer
from rapidformer.optim.schedule import build_scheduler
from rapidformer.tasks.runner import train_task
from tests.small import make_model_folder, make_pair_data

SETTINGS = {"micro_batch_size": 4, "epochs": 1, "lr": 1e-3, "weight_decay": 0.1, "seed": 1234,
            "lr_decay_style": "cosine", "min_lr": 1e-4, "lr_warmup_fraction": 0.1,
            "log_interval": 1, "log_level": "error", "device": "cpu"}  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("same")
    model = str(make_model_folder(folder / "model", dropout=0.0))
    data = make_pair_data(folder / "data", train=38, validation=8)
    tokenizer = AutoTokenizer.from_pretrained(model)
    raw = datasets.load_dataset("json", data_files={"train": str(data / "train.jsonl")})["train"]
    rows = raw.map(lambda row: tokenizer(row["sentence1"], row["sentence2"], truncation=True))
    kept = rows.remove_columns(["sentence1", "sentence2", "idx"])
    return {"model": model, "data": str(data), "rows": rows, "kept": kept,
            "collate": DataCollatorWithPadding(tokenizer)}  # fmt: skip


def build_model(parts: dict[str, Any]) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(parts["model"], num_labels=2)


def run_black_box(parts: dict[str, Any], folder: Path) -> None:
    source = {"task": "sequence_classification", "pretrained_model_name_or_path": parts["model"],
              "data_path": parts["data"]}  # fmt: skip
    train_task(RapidformerEngine(args={**SETTINGS, **source, "save": str(folder)}))


def run_finetuner(parts: dict[str, Any], folder: Path) -> None:
    class Pairs(Finetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            return parts["kept"], None, None, parts["collate"]

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return build_model(parts), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch).loss

    Pairs(RapidformerEngine(args={**SETTINGS, "save": str(folder)})).train()


def run_engine_loop(parts: dict[str, Any], folder: Path) -> None:
    engine = RapidformerEngine(args=SETTINGS)
    loader = engine.data.build_loader(
        parts["kept"], parts["collate"], shuffle=True, is_training=True
    )
    model, optimizer, schedule = engine.compose(build_model(parts))
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for batch in loader:
            loss = model(**batch).loss
            engine.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            file.write(json.dumps({"loss": loss.item()}) + "\n")


def run_hugging_face(parts: dict[str, Any], folder: Path, warmup_steps: float = 1) -> None:
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-3,
        weight_decay=0.1, seed=1234, lr_scheduler_type="cosine_with_min_lr",
        warmup_steps=warmup_steps,
        lr_scheduler_kwargs={"min_lr": 1e-4}, logging_steps=1, log_level="error", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(
        build_model(parts), arguments, data_collator=parts["collate"], train_dataset=parts["rows"]
    ).train()


def run_flagai(parts: dict[str, Any], folder: Path) -> None:
    trainer: Any = flagai.Trainer(
        env_type="pytorch", epochs=1, batch_size=4, lr=1e-3, log_interval=1, save_dir=str(folder),
        tensorboard_dir=None,
    )  # fmt: skip
    trainer.train(build_model(parts), train_dataset=parts["kept"], collate_fn=parts["collate"])


def run_accelerator(parts: dict[str, Any], folder: Path) -> None:
    """The script brings optimizer and schedule: here those that the other front ends build."""
    set_seed(1234)
    accelerator = Accelerator(cpu=True)
    settings = arguments_from_mapping(SETTINGS)
    model = build_model(parts)
    optimizer = build_optimizer(model, settings)
    loader = DataLoader(parts["kept"], batch_size=4, shuffle=True, collate_fn=parts["collate"])
    schedule = build_scheduler(
        optimizer, settings, train_iters=len(loader), count_samples=lambda updates: 4 * updates
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            file.write(json.dumps({"loss": loss.item()}) + "\n")


def run_mindformers(parts: dict[str, Any], folder: Path) -> None:
    arguments = mindformers.TrainingArguments(
        str(folder), batch_size=4, num_train_epochs=1, learning_rate=1e-3, weight_decay=0.1,
        seed=1234, lr_scheduler_type="cosine", lr_end=1e-4, warmup_ratio=0.1, sink_size=1,
        dataloader_drop_last=False, device_target="CPU", log_level="error",
    )  # fmt: skip
    trainer: Any = mindformers.Trainer(
        args=arguments, task="text_classification", model=parts["model"],
        train_dataset=f"{parts['data']}/train.jsonl",
    )  # fmt: skip
    trainer.finetune()


def read_losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [value["loss"] for value in map(json.loads, lines) if "loss" in value]


@pytest.fixture(scope="module")
def expected(parts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected") / "run"
    run_finetuner(parts, folder)
    losses = read_losses(folder)
    assert len(losses) == 10 and len(set(losses)) == 10
    return losses


@pytest.mark.parametrize(
    "run",
    [
        run_black_box, run_engine_loop, run_accelerator, run_hugging_face, run_flagai,
        run_mindformers,
    ],
)  # fmt: skip
def test_the_losses_are_equal(
    run: Any, parts: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    """To the last bit: the tenth loss has seen nine updates."""
    torch.manual_seed(5)  # what was drawn before does not matter
    run(parts, tmp_path / "run")
    assert read_losses(tmp_path / "run") == expected


def test_the_losses_of_transformers_own_schedule(
    parts: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    """A fraction as warm-up: transformers computes the curve, in other roundings."""
    run_hugging_face(parts, tmp_path / "run", warmup_steps=0.1)
    assert read_losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)
