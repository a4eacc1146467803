"""Saving on the main process alone, with ``Accelerator`` and with ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification, TrainerCallback

from rapidformer import Accelerator, Trainer
from rapidformer.config import Settings
from rapidformer.dialects.accelerate.settings import DeepSpeedPlugin, ProjectConfiguration
from rapidformer.errors import RapidformerError
from tests.dialects.small import collate, make_classifier, make_rows
from tests.dialects.test_trainer import make_trainer, read_losses
from tests.processes import run_in_kept_processes


def save_on_main(folder: str) -> list[str]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = make_classifier()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> None:
        batch = collate(make_rows(4, seed=accelerator.process_index))
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    if accelerator.is_main_process:
        accelerator.save_state()
        accelerator.save_model(model, f"{folder}/model")
        accelerator.save_model(make_classifier(), f"{folder}/other")
        weights = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/own", state_dict=weights)
    train()
    accelerator.wait_for_everyone()
    names = [Path(accelerator.save_state()).parent.name]  # on all of them
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_0")
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    for name in ("model", "own"):
        torch.testing.assert_close(load_file(f"{folder}/{name}/model.safetensors"), before)
    accelerator.wait_for_everyone()
    return names


def test_the_main_process_saves_alone(tmp_path: Path) -> None:
    assert run_in_kept_processes(save_on_main, 2, str(tmp_path)) == [["checkpoint_1"]] * 2


def gather_everywhere() -> list[bool]:
    accelerator, other = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    model = make_classifier()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same = []
    for each in (model, other):
        whole = accelerator.get_state_dict(each)
        same.append(whole.keys() == each.state_dict().keys())
        each.load_state_dict(whole)
    return same


def test_every_process_gets_the_weights_that_it_holds() -> None:
    assert run_in_kept_processes(gather_everywhere, 2) == [[True, True]] * 2


def save_sharded_on_main(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model = make_classifier()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    messages = []
    if accelerator.is_main_process:
        for save in (
            lambda: accelerator.save_state(folder),
            lambda: accelerator.save_model(model, folder),
            lambda: accelerator.get_state_dict(model),
            lambda: accelerator.unwrap_model(model).save_pretrained(folder),
        ):
            with pytest.raises(RapidformerError, match="call it on all of them") as error:
                save()
            messages.append(str(error.value).partition(" was called")[0])
    accelerator.wait_for_everyone()
    return messages


def test_sharded_weights_are_not_saved_by_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    into = f"saving a model to {folder!r}"
    messages, _ = run_in_kept_processes(save_sharded_on_main, 2, folder)
    assert messages == [f"save_state({folder!r})", into, "gathering the weights", into]


class SaveOnMain(TrainerCallback):  # type: ignore[misc]
    """At every step, into folders of its own; the loop saves in the background meanwhile."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            self.trainer.save_model(f"{args.output_dir}/mine-{state.global_step}")


class Behind(Trainer):
    def build_settings(self) -> Settings:
        return super().build_settings().replace("the test", async_save="on")


def train_and_save(folder: str) -> None:
    callback = SaveOnMain()
    trainer = callback.trainer = make_trainer(
        f"{folder}/two", Behind, callbacks=[callback], per_device_train_batch_size=2,
        num_train_epochs=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(f"{folder}/last")
        trainer.save_state()


def test_a_trainer_saves_on_the_main_process_alone(tmp_path: Path) -> None:
    run_in_kept_processes(train_and_save, 2, str(tmp_path))
    make_trainer(tmp_path / "one", num_train_epochs=1).train()
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(tmp_path / "one"), abs=1e-6)
    last = BertForSequenceClassification.from_pretrained(tmp_path / "last").state_dict()
    for name in ("mine-4", "checkpoint-4"):
        saved = BertForSequenceClassification.from_pretrained(tmp_path / "two" / name).state_dict()
        torch.testing.assert_close(saved, last, rtol=0, atol=0)


def evaluate_on_main(folder: str) -> list[str]:
    trainer, messages = make_trainer(folder), []
    trainer.evaluate()
    if trainer.is_world_process_zero():
        for call in (trainer.evaluate, lambda: trainer.predict(trainer.eval_dataset)):
            with pytest.raises(RapidformerError, match="call it on all of them") as error:
                call()
            messages.append(str(error.value).partition(" was called")[0])
    trainer.accelerator.wait_for_everyone()
    assert trainer.evaluate()["eval_loss"] > 0
    return messages


def test_an_evaluation_on_the_main_process_alone_is_an_error(tmp_path: Path) -> None:
    """Each process evaluates a part of the rows; transformers waits for the others in vain."""
    messages, _ = run_in_kept_processes(evaluate_on_main, 2, str(tmp_path))
    assert messages == ["evaluate()", "predict()"]


class EvaluateOnMain(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None
        self.messages: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero and state.global_step == 1:
            with pytest.raises(RapidformerError) as error:
                self.trainer.evaluate()
            self.messages.append(str(error.value))


def evaluate_while_training(folder: str) -> list[str]:
    callback = EvaluateOnMain()
    trainer = callback.trainer = make_trainer(folder, callbacks=[callback], max_steps=2)
    trainer.train()
    return callback.messages


def test_a_callback_on_the_main_process_cannot_evaluate_alone(tmp_path: Path) -> None:
    [message], nothing = run_in_kept_processes(evaluate_while_training, 2, str(tmp_path))
    assert message.startswith("evaluate() was called on rank 0, and not on every rank (rank 1 ")
    assert message.endswith("call it on all of them, outside of `if rank == 0`.")
    assert nothing == []
