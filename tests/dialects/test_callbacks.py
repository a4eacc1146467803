"""transformers' own callbacks, unchanged, on the loop's hook points."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import rapidformer
from rapidformer import Trainer
from tests.dialects.small import collate, make_classifier, make_dataset
from tests.dialects.test_trainer import make_trainer, read_losses
from tests.processes import run_in_kept_processes


class Watcher(TrainerCallback):
    """Notes every event, with the step it came at."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_"):
            return found

        def note(args: Any, state: Any, control: Any, **details: Any) -> Any:
            assert details["model"] is not None and "optimizer" in details
            self.events.append((name, state.global_step))
            if name == "on_log":
                self.logs.append(details["logs"])
            return None

        return note


def test_events_in_their_order(tmp_path: Path) -> None:
    watcher = Watcher()
    make_trainer(
        tmp_path, callbacks=[watcher], max_steps=2, eval_strategy="steps", eval_steps=2,
        save_steps=2,
    ).train()  # fmt: skip
    names = [name for name, _ in watcher.events if name != "on_prediction_step"]
    step = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    assert names == [
        "on_init_end", "on_train_begin", "on_epoch_begin", *step, "on_log", *step, "on_log",
        "on_log", "on_evaluate", "on_save", "on_epoch_end", "on_log", "on_train_end",
    ]  # fmt: skip
    assert ("on_step_end", 1) in watcher.events and ("on_save", 2) in watcher.events
    assert watcher.logs[0].keys() == {"loss", "grad_norm", "learning_rate", "epoch"}
    assert {"eval_loss", "eval_accuracy", "eval_runtime"} <= watcher.logs[2].keys()
    assert {"train_loss", "train_runtime", "total_flos", "epoch"} <= watcher.logs[3].keys()


def test_the_handler_takes_transformers_calls(tmp_path: Path) -> None:
    watcher = Watcher()
    trainer = make_trainer(tmp_path, callbacks=[watcher])
    handler = trainer.callback_handler
    assert handler.model is trainer.model and handler.optimizer is None
    trainer.control.should_save = True
    control = handler.on_save(trainer.args, trainer.state, trainer.control)
    assert control.should_save is False
    handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics={"eval_loss": 1.0})
    handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    names = [name for name, _ in watcher.events]
    assert names == ["on_init_end", "on_save", "on_evaluate", "on_push_begin"]


def test_events_between_the_micro_batches_of_an_update(tmp_path: Path) -> None:
    watcher = Watcher()
    make_trainer(
        tmp_path, callbacks=[watcher], max_steps=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
    ).train()  # fmt: skip
    names = [name for name, _ in watcher.events]
    start = names.index("on_step_begin")
    assert names[start : start + 4] == ["on_step_begin", *["on_substep_end"] * 2,
                                        "on_pre_optimizer_step"]  # fmt: skip


def test_a_run_writes_one_tensorboard_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged at the end comes before ``on_train_end``, which closes the file."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    make_trainer(
        tmp_path / "out", max_steps=2, eval_strategy="steps", eval_steps=1, report_to="tensorboard"
    ).train()
    [file] = [path for path in (tmp_path / "board").rglob("events.*") if path.is_file()]
    tags = EventAccumulator(str(file)).Reload().Tags()["scalars"]
    assert {"train/loss", "eval/loss", "train/train_runtime"} <= set(tags)


def test_a_tracker_of_ours_hears_what_a_callback_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; a resumed run has the id of the first, and evaluate() after train() is heard."""
    heard: list[Any] = []

    class Mine:
        def start(self, run: Any) -> None:
            heard.append((run.name, run.project, run.resume_step, run.recall("mine")))
            assert run.settings["learning_rate"] and "hidden_size" in run.settings
            run.remember("mine", "id-7")

        def log(self, values: Any, step: Any) -> None:
            heard.append((step, {name for name in values if name in ("loss", "eval_loss", "own")}))

        def finish(self) -> None:
            heard.append("finish")

    module: Any = ModuleType("mine")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, "mine", module)
    options = {"logging_steps": 1, "report_to": ["mine:Mine"], "save_steps": 1}
    trainer = make_trainer(tmp_path / "out", max_steps=1, **options)
    trainer.train()
    trainer.evaluate()
    trainer.log({"own": 1.0})
    trainer = make_trainer(tmp_path / "out", max_steps=2, **options)
    trainer.train(resume_from_checkpoint=True)
    for callback in trainer.callbacks.callbacks:
        callback._finish()
    assert ("out", "huggingface", 0, None) in heard and ("out", "huggingface", 1, "id-7") in heard
    first = heard[: heard.index(("out", "huggingface", 1, "id-7"))]
    assert [(1, {"loss"}), (1, set()), (1, {"eval_loss"}), (1, {"own"})] == first[1:5]
    assert (2, {"loss"}) in heard and heard[-1] == "finish"


def test_a_resumed_run_restores_its_callbacks(tmp_path: Path) -> None:
    def resume(**given: Any) -> EarlyStoppingCallback:
        stopping = EarlyStoppingCallback(3)
        checkpoint = str(tmp_path / "iter_0000008") if given else None
        make_trainer(
            tmp_path, callbacks=[stopping], eval_strategy="epoch", save_strategy="epoch",
            load_best_model_at_end=True, compute_metrics=lambda _: {"score": 1.0},
            metric_for_best_model="score", **given,
        ).train(resume_from_checkpoint=checkpoint)  # fmt: skip
        return stopping

    assert resume().early_stopping_patience_counter == 1  # one epoch after the first
    states = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    kept = states["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
    assert kept == {"early_stopping_patience_counter": 1}
    restored = resume(num_train_epochs=3, restore_callback_states_from_checkpoint=True)
    assert restored.early_stopping_patience_counter == 2
    assert resume(num_train_epochs=3).early_stopping_patience_counter == 1


def test_history_state_and_result(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, logging_steps=2, num_train_epochs=1)
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == trainer.state.max_steps == 4
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [(line["step"], line["epoch"]) for line in lines] == [(2, 0.5), (4, 1.0)]
    assert output.training_loss == pytest.approx(sum(line["loss"] for line in lines) / 2)
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 4


def test_a_callback_may_ask_for_anything(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> Any:
            control.should_evaluate = control.should_save = state.global_step == 3
            control.should_training_stop = state.global_step == 5
            return control

    watcher = Watcher()
    trainer = make_trainer(tmp_path, callbacks=[Asks, watcher])
    trainer.train()
    assert ("on_save", 3) in watcher.events and ("on_evaluate", 3) in watcher.events
    assert watcher.events.count(("on_evaluate", 5)) == 0  # the settings ask for none at the end
    assert trainer.state.global_step == 5 == len(read_losses(tmp_path))


def test_a_callback_may_take_back_what_it_asked_for_within_a_step(tmp_path: Path) -> None:
    class Wavers(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            control.should_training_stop = control.should_save = True

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            assert control.should_training_stop and control.should_save
            control.should_training_stop = control.should_save = False

    watcher = Watcher()
    trainer = make_trainer(tmp_path, callbacks=[Wavers, watcher], max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    assert [step for event, step in watcher.events if event == "on_save"] == [3]


def test_an_epoch_that_a_callback_stops_is_one_of_those_asked_for(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    trainer = make_trainer(tmp_path, callbacks=[Stops])
    trainer.train()
    assert trainer.state.global_step == 2 + 4
    assert trainer.state.log_history[-1]["epoch"] == 2.0


def test_stopping_an_epoch_that_has_ended_stops_no_other(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            control.should_epoch_stop = True

    trainer = make_trainer(tmp_path, callbacks=[Stops])
    trainer.train()
    assert trainer.state.global_step == 2 * 4


def test_early_stopping_as_transformers_ships_it(tmp_path: Path) -> None:
    scores = iter([1.0, 0.5, 0.25, 0.125])

    def never_better(prediction: Any) -> dict[str, float]:
        return {"score": next(scores)}

    trainer = make_trainer(
        tmp_path, compute_metrics=never_better, eval_strategy="epoch",
        save_strategy="epoch", num_train_epochs=9, load_best_model_at_end=True,
        metric_for_best_model="score", callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 12  # the first epoch was the best
    assert trainer.state.best_metric == 1.0 and trainer.state.best_global_step == 4
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


def test_callbacks_are_added_and_removed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(PrinterCallback)
    watcher = Watcher()
    trainer.add_callback(watcher)
    assert isinstance(trainer.pop_callback(PrinterCallback), PrinterCallback)
    trainer.remove_callback(watcher)
    trainer.train()
    assert not watcher.events


def test_log_of_a_subclass(tmp_path: Path) -> None:
    class Shouts(Trainer):
        seen: list[dict[str, float]] = []  # noqa: RUF012

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.seen.append(logs)
            super().log({**logs, "extra": 1.0}, start_time)

    trainer = make_trainer(tmp_path, cls=Shouts, num_train_epochs=0.1)
    trainer.train()
    assert "loss" in Shouts.seen[0]
    assert trainer.state.log_history[0]["extra"] == 1.0


def test_scripts_find_the_last_checkpoint_and_its_history(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_steps=1, save_total_limit=2, num_train_epochs=1).train()
    last = get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "checkpoint-4")
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    again = make_trainer(tmp_path, save_steps=2, num_train_epochs=2)
    again.train(resume_from_checkpoint=last)
    steps = [line["step"] for line in again.state.log_history if "loss" in line]
    assert steps == list(range(1, 9))


def test_evaluate_in_a_callback_is_without_dropout(tmp_path: Path) -> None:
    modes: list[tuple[bool, bool]] = []

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            model = details["model"]
            hook = model.register_forward_pre_hook(lambda module, _: seen.add(module.training))
            seen: set[bool] = set()
            trainer.evaluate()
            hook.remove()
            modes.append((seen == {False}, model.training))

    trainer = make_trainer(tmp_path, callbacks=[Evaluates], max_steps=1)
    trainer.train()
    assert modes == [(True, True)]


class Asks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_save = state.global_step == 2
        control.should_training_stop = state.global_step == 3


class AsksEarly(TrainerCallback):
    """Before the loop has decided what is due."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 2


class TakesBack(TrainerCallback):
    """Asks to stop before the first step, and takes it back within the step."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_training_stop = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_training_stop = False
        control.should_save = state.global_step == 1

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize("callback", [Asks, AsksEarly, TakesBack])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_process_decides_for_all(tmp_path: Path, rank: int, callback: Any) -> None:
    for steps, folders in run_in_kept_processes(_ask_on, 2, rank, str(tmp_path), callback):
        assert steps == 3
        assert "iter_0000002" in folders


def _ask_on(rank: int, folder: str, callback: Any) -> tuple[int, list[str]]:
    trainer = make_trainer(folder, per_device_train_batch_size=2, save_total_limit=None)
    if trainer.args.process_index == rank:
        trainer.add_callback(callback)
    trainer.train()
    return trainer.state.global_step, [path.name for path in Path(folder).iterdir()]


class SavesUnlessFirst(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_save = state.global_step == 2 and not state.is_world_process_zero


def test_what_the_first_process_takes_back_is_not_done(tmp_path: Path) -> None:
    for folders in run_in_kept_processes(_take_back, 2, str(tmp_path)):
        assert "iter_0000002" not in folders


def _take_back(folder: str) -> list[str]:
    trainer = make_trainer(
        folder, per_device_train_batch_size=2, save_total_limit=None, max_steps=3,
        save_strategy="steps", save_steps=2, callbacks=[SavesUnlessFirst],
    )  # fmt: skip
    trainer.train()
    return [path.name for path in Path(folder).iterdir()]


class AroundTheStep(TrainerCallback):
    """Reads the gradient where scripts read it, and changes it where they change it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float, float]] = []

    def look(self, state: Any, details: dict[str, Any]) -> None:
        gradients = [p.grad for p in details["model"].parameters()]
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        rate = details["optimizer"].param_groups[0]["lr"]
        self.seen.append((state.global_step, state.epoch, norm, rate))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.look(state, details)
        for parameter in details["model"].bert.encoder.layer[0].parameters():
            parameter.grad.zero_()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.look(state, details)


def test_gradients_before_and_after_the_optimizer_are_transformers(tmp_path: Path) -> None:
    """They are clipped before the callback changes them, and there until the update is over."""
    found = []
    for room in (rapidformer, transformers):
        settings: Any = room.TrainingArguments(
            str(tmp_path / room.__name__), use_cpu=True, max_grad_norm=0.5, learning_rate=5e-3,
            per_device_train_batch_size=4, train_sampling_strategy="sequential", max_steps=3,
            disable_tqdm=True, save_strategy="no", report_to="none",
        )  # fmt: skip
        watcher = AroundTheStep()
        model = make_classifier()
        trainer: Any = room.Trainer(
            model, settings, collate, train_dataset=make_dataset(), callbacks=[watcher]
        )
        trainer.train()
        found.append((watcher.seen, model.classifier.weight.detach()))
    (ours, weights), (theirs, their_weights) = found
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-6)


def test_a_model_is_in_the_mode_of_what_came_last(tmp_path: Path) -> None:
    """Scripts call it next: with dropout, the predictions after ``evaluate`` would be others."""
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert trainer.model.training
    trainer.evaluate()
    assert not trainer.model.training
    trainer.args.eval_strategy = "epoch"
    trainer.train()
    assert not trainer.model.training
