"""``Trainer`` beside transformers' own: the same numbers, and mistakes found as early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import rapidformer
from rapidformer.errors import ConfigurationError, DataError
from tests.processes import run_in_kept_processes


def make_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes))


def make_rows(*, shifts: bool) -> list[dict[str, torch.Tensor]]:
    """Rows with labels of very unequal number; of those that are shifted already, even fewer."""
    torch.manual_seed(1)
    rows = []
    for number in range(16):
        labels = torch.randint(0, 50, (32,))
        row = {"input_ids": labels.clone(), "labels": labels}
        labels[: number * 5 % 28] = -100
        if shifts:
            row["shift_labels"] = torch.cat([labels[1:], torch.tensor([-100])])
            row["shift_labels"][20 + number % 3 : 26] = -100
        rows.append(row)
    return rows


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Joined:
    """A loader of several loaders, as scripts for several tasks have it."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


def train(
    room: ModuleType, folder: Path, rows: list[Any], *, joins: bool = False, **settings: Any
) -> list[Any]:
    """Losses, gradient norms, rates and places of the run's updates."""

    class Joining(room.Trainer):
        def get_train_dataloader(self) -> Any:
            load = super().get_train_dataloader
            return Joined(load(), load()) if joins else load()

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            load = super().get_eval_dataloader
            return Joined(load(eval_dataset), load(eval_dataset)) if joins else load(eval_dataset)

    arguments = room.TrainingArguments(
        str(folder / room.__name__), use_cpu=True, logging_steps=1, learning_rate=0.5, optim="sgd",
        train_sampling_strategy="sequential", disable_tqdm=True, save_strategy="no",
        num_train_epochs=2, remove_unused_columns=False, **settings,
    )  # fmt: skip
    trainer = Joining(make_llama(), arguments, stack, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    assert len(trainer.predict(rows[:8]).predictions) == 8
    assert trainer.evaluate()["epoch"] == 2.0
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = ("loss", "grad_norm", "learning_rate", "epoch")
    return [line[name] for line in lines for name in names]


@pytest.mark.parametrize("shifts", [False, True], ids=["labels", "shifted labels"])
def test_unequal_micro_batches_of_a_language_model(tmp_path: Path, shifts: bool) -> None:
    """What is predicted is counted, also where the collate function has shifted the labels."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    rows = make_rows(shifts=shifts)
    ours = train(rapidformer, tmp_path, rows, **settings)
    theirs = train(transformers, tmp_path, rows, **settings)
    assert len(ours) == 4 * 4
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_micro_batch_of_padding_alone(tmp_path: Path) -> None:
    """As empty lines of a text become, if no token marks the start of a row."""
    rows = make_rows(shifts=False)
    for number, row in enumerate(rows):
        length = 0 if number in (2, 3, 9) else 4 + number
        row["labels"][length:] = -100
        row["attention_mask"] = (torch.arange(32) < length).long()
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    ours = train(rapidformer, tmp_path, rows, **settings)
    assert ours == pytest.approx(train(transformers, tmp_path, rows, **settings), rel=1e-5)


@pytest.mark.parametrize("kind", ["all", "non_padding"])
def test_tokens_are_counted_if_asked_for(tmp_path: Path, kind: str) -> None:
    rows = [{**row, "attention_mask": torch.arange(32) < 20} for row in make_rows(shifts=False)]
    found = []
    for room in (rapidformer, transformers):
        folder = tmp_path / room.__name__
        for resumed in (None, str(folder / "checkpoint-2")):
            arguments: Any = room.TrainingArguments(
                str(folder), use_cpu=True, logging_steps=1, max_steps=5, save_steps=2,
                include_num_input_tokens_seen=kind, per_device_train_batch_size=2,
                gradient_accumulation_steps=2, disable_tqdm=True,
            )  # fmt: skip
            trainer: Any = room.Trainer(make_llama(), arguments, stack, train_dataset=rows)
            trainer.train(resume_from_checkpoint=resumed)
            history = trainer.state.log_history
            found.append([line["num_input_tokens_seen"] for line in history])
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][:2] == [128, 256] if kind == "all" else [80, 160]


def test_a_loader_that_is_none_of_torchs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    rows = make_rows(shifts=False)
    ours = train(rapidformer, tmp_path, rows, joins=True, **settings)
    theirs = train(transformers, tmp_path, rows, joins=True, **settings)
    assert len(ours) == 8 * 4
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_loader_that_is_none_of_torchs_cannot_be_divided(tmp_path: Path) -> None:
    for text in run_in_kept_processes(_join_on_ranks, 2, str(tmp_path)):
        assert "a Joined cannot be divided over 2 processes: return a torch DataLoader" in text


def _join_on_ranks(folder: str) -> str:
    with pytest.raises(DataError) as caught:
        train(rapidformer, Path(folder), make_rows(shifts=False), joins=True)
    return str(caught.value)


def test_a_loss_that_is_divided_by_the_accelerators_accumulation(tmp_path: Path) -> None:
    """transformers' accelerator says 1: its Trainer accumulates by itself."""
    found = []
    for room in (rapidformer, transformers):

        class Dividing(room.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
                return model(**inputs).loss / self.accelerator.gradient_accumulation_steps

        arguments = room.TrainingArguments(
            str(tmp_path / room.__name__), use_cpu=True, logging_steps=1, max_steps=1,
            gradient_accumulation_steps=4, per_device_train_batch_size=4, save_strategy="no",
            train_sampling_strategy="sequential", disable_tqdm=True,
        )  # fmt: skip
        rows = [{**row, "labels": row["input_ids"]} for row in make_rows(shifts=False)]
        trainer = Dividing(make_llama(), arguments, stack, train_dataset=rows)
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        found.append(trainer.state.log_history[0]["grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_generation_config_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    bad = GenerationConfig(do_sample=False, top_p=0.9)
    arguments = rapidformer.Seq2SeqTrainingArguments(str(tmp_path), generation_config=bad)
    with pytest.raises(
        ConfigurationError, match=r"generation_config contradicts itself.*[\s\S]*top_p"
    ):
        rapidformer.Seq2SeqTrainer(make_llama(), arguments)
    path = tmp_path / "mine.json"
    path.write_text(GenerationConfig(max_new_tokens=7).to_json_string())
    arguments = rapidformer.Seq2SeqTrainingArguments(str(tmp_path), generation_config=str(path))
    trainer: Any = rapidformer.Seq2SeqTrainer(make_llama(), arguments)
    assert trainer.model.generation_config.max_new_tokens == 7
