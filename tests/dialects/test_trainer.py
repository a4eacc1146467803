"""``Trainer`` in Hugging Face's words: verbs, hooks, data, and the same numbers as elsewhere."""

from __future__ import annotations

import gc
import inspect
import json
import shutil
import weakref
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    TrainerCallback,
    get_constant_schedule,
    get_scheduler,
)

from rapidformer import Finetuner, RapidformerEngine, Trainer, TrainingArguments
from rapidformer.dialects.huggingface.loss import call_with_count
from rapidformer.dialects.huggingface.names import HUGGING_FACE
from rapidformer.errors import CheckpointError, ConfigurationError, DataError, RapidformerError
from tests.dialects.small import collate, compute_accuracy, make_classifier, make_dataset, make_rows
from tests.processes import run_in_kept_processes, run_in_processes


def make_arguments(folder: Path | str, **settings: Any) -> TrainingArguments:
    given = {"logging_steps": 1, "num_train_epochs": 2, "log_level": "error", "use_cpu": True,
             "disable_tqdm": True, "per_device_train_batch_size": 4}  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **settings})


def make_trainer(folder: Path | str, cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
    settings = {k: given.pop(k) for k in list(given) if k in HUGGING_FACE}
    names: dict[str, Any] = {
        "model": make_classifier() if "model_init" not in given else None,
        "args": make_arguments(folder, **settings),
        "data_collator": collate,
        "train_dataset": make_dataset(),
        "eval_dataset": make_dataset(13, seed=1),
        "compute_metrics": compute_accuracy,
    }
    return cls(**{**names, **given})


def read_losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# ---- the same numbers as every other front end -----------------------------------------------


class Same(Finetuner):
    def train_valid_test_datasets_provider(self) -> Any:
        return make_rows(), None, None, collate

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return make_classifier(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss


OTHER_WORDS = {"micro_batch_size": 4, "epochs": 2, "lr": 5e-5, "weight_decay": 0.0, "seed": 42,
               "log_interval": 1, "log_level": "error", "device": "cpu"}  # fmt: skip


def test_the_losses_of_a_finetuner_bit_for_bit(tmp_path: Path) -> None:
    Same(RapidformerEngine(args={**OTHER_WORDS, "save": str(tmp_path / "finetuner")})).train()
    make_trainer(tmp_path / "trainer", eval_dataset=None).train()
    expected = read_losses(tmp_path / "finetuner")
    assert len(expected) == 8
    assert read_losses(tmp_path / "trainer") == expected


def test_the_losses_of_an_engine_loop_bit_for_bit(tmp_path: Path) -> None:
    make_trainer(tmp_path, eval_dataset=None).train()
    engine = RapidformerEngine(args=OTHER_WORDS)
    loader = engine.data.build_loader(make_rows(), collate, shuffle=True)
    model, _, _ = engine.compose(make_classifier())
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            engine.backward(loss, len(batch["labels"]))
            engine.step()
            losses.append(loss.item())
    assert read_losses(tmp_path) == losses


def test_accumulation_is_exact(tmp_path: Path) -> None:
    rows = make_dataset(38)  # the last update of an epoch is smaller
    for name, settings in {
        "whole": {"per_device_train_batch_size": 8},
        "parts": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    }.items():
        make_trainer(tmp_path / name, train_dataset=rows, **settings).train()
    whole, parts = read_losses(tmp_path / "whole"), read_losses(tmp_path / "parts")
    assert len(whole) == len(parts) == 10
    assert parts == pytest.approx(whole, abs=1e-6)


def test_two_processes_train_and_predict_as_one(tmp_path: Path) -> None:
    kinds = ["", "full_shard auto_wrap", "shard_grad_op"]
    [[alone]] = run_in_kept_processes(_train_each, 1, str(tmp_path / "one"), 4, [""])
    everyone = run_in_kept_processes(_train_each, 2, str(tmp_path / "two"), 2, kinds)
    for kind, *results in zip(kinds, *everyone, strict=True):
        for result in results:
            assert result["shapes"] == alone["shapes"] == [(13, 2), (13,)], kind
            np.testing.assert_allclose(result["predictions"], alone["predictions"], atol=1e-5)
            assert result["metrics"] == pytest.approx(alone["metrics"], abs=1e-6), kind
            assert result["losses"] == pytest.approx(alone["losses"], abs=1e-6), kind
        folder = tmp_path / f"two-{kinds.index(kind)}"
        again = make_trainer(folder, num_train_epochs=2)
        again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-4")
        assert again.state.global_step == 8


def _train_each(folder: str, batch: int, kinds: list[str]) -> list[dict[str, Any]]:
    return [_train_and_predict(f"{folder}-{n}", batch, kind) for n, kind in enumerate(kinds)]


def _train_and_predict(folder: str, batch: int, sharding: str) -> dict[str, Any]:
    given: dict[str, Any] = {"per_device_train_batch_size": batch, "fsdp": sharding}
    trainer = make_trainer(folder, num_train_epochs=1, **given)
    before = trainer.evaluate()
    trainer.train()
    trainer.train()  # from the weights of now; the hooks of the first run are not doubled
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {8.0}  # kept
    loaded, last = (
        BertForSequenceClassification.from_pretrained(f"{folder}/{name}").state_dict()
        for name in ("checkpoint-4", "last")
    )
    torch.testing.assert_close(loaded, last, atol=0, rtol=0)
    output = trainer.predict(make_dataset(13, seed=1))
    assert output.metrics is not None
    after = [output.metrics[f"test_{name}"] for name in ("loss", "accuracy")]
    return {
        "shapes": [output.predictions.shape, output.label_ids.shape],  # type: ignore[union-attr]
        "predictions": output.predictions,
        "metrics": [before["eval_loss"], *after],
        "losses": read_losses(Path(folder)),
    }


def test_a_deepspeed_dictionary_trains_as_one_process(tmp_path: Path) -> None:
    make_trainer(tmp_path / "one", num_train_epochs=1).train()
    run_in_processes(_train_by_deepspeed, 2, str(tmp_path / "two"))
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(tmp_path / "one"), abs=1e-6)


def _train_by_deepspeed(folder: str) -> None:
    content = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "deepspeed": content}
    trainer = make_trainer(folder, num_train_epochs=1, **given)
    trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] >= 0


# ---- verbs -------------------------------------------------------------------------------------


def test_predict_gives_rows_in_order(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    data = make_dataset(13, seed=1)
    predictions, labels, metrics = trainer.predict(data)
    model = make_classifier().eval()
    with torch.no_grad():
        alone = torch.cat([model(**collate([row])).logits for row in data])
    np.testing.assert_allclose(predictions, alone.numpy(), atol=1e-6)
    assert labels.tolist() == data["label"]  # type: ignore[union-attr]
    assert metrics is not None and metrics["test_accuracy"] == pytest.approx(
        float((alone.argmax(-1).numpy() == np.array(data["label"])).mean())
    )
    # The exact mean over all examples, though the last batch is smaller.
    exact = torch.nn.functional.cross_entropy(alone, torch.tensor(data["label"]))
    assert metrics["test_loss"] == pytest.approx(float(exact), abs=1e-6)


def test_an_evaluation_batch_without_labels_does_not_count(tmp_path: Path) -> None:
    def mark_tokens(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        return {**batch, "labels": batch["input_ids"] * 0 + batch["labels"][:, None]}

    config = make_classifier().config
    trainer = Trainer(
        BertForTokenClassification(config),
        TrainingArguments(str(tmp_path), per_device_eval_batch_size=1, report_to="none"),
        mark_tokens,
        eval_dataset=[row := make_dataset(1)[0]],
    )
    wanted = trainer.evaluate()["eval_loss"]
    found = trainer.evaluate([row, {**row, "label": -100}])["eval_loss"]
    assert found == pytest.approx(wanted)


def test_evaluate_train_evaluate(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, learning_rate=1e-2)
    first = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first["eval_loss"]
    alone = make_trainer(tmp_path / "alone", learning_rate=1e-2)
    alone.train()
    assert read_losses(tmp_path) == read_losses(tmp_path / "alone")


def test_training_again_into_the_same_folder_keeps_one_earlier_run(tmp_path: Path) -> None:
    for _ in range(3):
        make_trainer(tmp_path, num_train_epochs=1).train()
    assert (tmp_path / "previous" / "metrics.jsonl").is_file()
    assert not (tmp_path / "previous" / "previous").exists()
    assert read_losses(tmp_path) == read_losses(tmp_path / "previous")


def test_two_trainers_with_one_model(tmp_path: Path) -> None:
    model = make_classifier()
    make_trainer(tmp_path / "a", model=model, learning_rate=1e-2).train()
    again = make_trainer(tmp_path / "b", model=model).evaluate()
    loaded = make_trainer(
        tmp_path / "c", model=type(model).from_pretrained(tmp_path / "a" / "last")
    )
    assert again["eval_loss"] == pytest.approx(loaded.evaluate()["eval_loss"], abs=1e-7)


def test_resuming_is_bit_equal(tmp_path: Path) -> None:
    make_trainer(tmp_path / "whole", save_steps=3).train()
    trainer = make_trainer(tmp_path / "parts", save_steps=3)
    trainer.train()
    for path in (tmp_path / "parts").glob("iter_*"):
        if path.name != "iter_0000003":
            shutil.rmtree(path)
    make_trainer(tmp_path / "parts", save_steps=3).train(resume_from_checkpoint=True)
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"resume_from_checkpoint=True: .* no checkpoint"):
        make_trainer(tmp_path / "none").train(resume_from_checkpoint=True)


def test_saving_models_and_state(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.save_state()
    loaded = type(trainer.model).from_pretrained(tmp_path / "model")  # type: ignore[attr-defined]
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 8
    trainer.save_metrics("eval", {"eval_loss": 1.0})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_loss": 1.0}
    trainer.create_model_card(tasks="text-classification")
    assert "text-classification" in (tmp_path / "README.md").read_text()


def test_several_evaluation_sets(tmp_path: Path) -> None:
    sets = {"near": make_dataset(5, seed=1), "far": make_dataset(6, seed=2)}
    metrics = make_trainer(tmp_path, eval_dataset=sets).evaluate()
    assert {"eval_near_loss", "eval_far_accuracy"} <= metrics.keys()


# ---- what a subclass or the constructor may replace ------------------------------------------


def test_compute_loss_of_a_subclass(tmp_path: Path) -> None:
    class Doubled(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = 2 * torch.nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    make_trainer(tmp_path / "plain", num_train_epochs=0.1).train()
    trainer = make_trainer(tmp_path / "double", cls=Doubled, num_train_epochs=0.1)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert read_losses(tmp_path / "double")[0] == 2 * read_losses(tmp_path / "plain")[0]
    assert before == pytest.approx(2 * make_trainer(tmp_path / "e").evaluate()["eval_loss"])


def test_compute_loss_func_divides_by_the_count(tmp_path: Path) -> None:
    def total(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        return loss / num_items_in_batch

    make_trainer(tmp_path / "plain").train()
    accumulates = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    make_trainer(tmp_path / "own", compute_loss_func=total, **accumulates).train()
    plain, own = read_losses(tmp_path / "plain"), read_losses(tmp_path / "own")
    assert own == pytest.approx(plain, abs=1e-6)


def test_training_step_of_a_subclass(tmp_path: Path) -> None:
    class Seen(Trainer):
        steps = 0

        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            type(self).steps += 1
            return super().training_step(model, inputs, *rest, **named)

    class ByHand(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    class Bypass(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    for cls in (Trainer, Seen, ByHand):
        make_trainer(tmp_path / cls.__name__, cls=cls).train()
    plain = read_losses(tmp_path / "Trainer")
    assert plain == read_losses(tmp_path / "Seen") == read_losses(tmp_path / "ByHand")
    assert Seen.steps == 8
    with pytest.raises(RapidformerError, match="training_step must return the loss with its graph"):
        make_trainer(tmp_path / "bypass", cls=Bypass).train()


class Attack:
    """FGM and PGD as scripts write them: move the embeddings along their gradient."""

    def __init__(self, model: Any) -> None:
        self.weight = model.get_input_embeddings().weight
        self.before = self.weight.data.clone()

    def attack(self) -> None:
        norm = self.weight.grad.norm()
        assert norm > 0
        self.weight.data.add_(0.5 * self.weight.grad / norm)

    def restore(self) -> None:
        self.weight.data.copy_(self.before)


class FastGradient(Trainer):
    """As it is written for transformers' Trainer, whose training_step back-propagates itself."""

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        loss = super().training_step(model, inputs, *rest, **named)
        attack = Attack(model)
        attack.attack()
        super().training_step(model, inputs, *rest, **named)
        attack.restore()
        return loss


class ProjectedGradient(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        attack = Attack(model)
        for number in range(2):
            attack.attack()
            if number == 0:
                model.zero_grad()
            else:
                for name, p in model.named_parameters():
                    p.grad = kept.get(name)
            self.accelerator.backward(self.compute_loss(model, inputs))
        attack.restore()
        return loss.detach()


def run_plainly(kind: type[Trainer], updates: int) -> list[float]:
    """The same in a bare loop: losses before each update."""
    model, rows, losses = make_classifier(), make_rows(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(updates):
        batch = collate(rows[4 * step : 4 * step + 4])
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        attack, first = Attack(model), [p.grad for p in model.parameters()]
        attack.attack()
        if kind is ProjectedGradient:
            model.zero_grad()
            model(**batch).loss.backward()
            attack.attack()
            for parameter, gradient in zip(model.parameters(), first, strict=True):
                parameter.grad = gradient
        model(**batch).loss.backward()
        attack.restore()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def attack_in_trainer(folder: Path | str, kind: type[Trainer], **given: Any) -> list[float]:
    model = make_classifier()
    trainer = make_trainer(
        folder, cls=kind, model=model, max_steps=4, max_grad_norm=0.0,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        lr_scheduler_type="constant", train_sampling_strategy="sequential", **given,
    )  # fmt: skip
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_an_attack_reads_the_gradient_of_all_processes(tmp_path: Path) -> None:
    """Also if the weights are sharded."""
    found = run_in_kept_processes(_attack_sharded, 2, str(tmp_path))[0]
    assert found == pytest.approx(run_plainly(FastGradient, 4), abs=1e-6)


def _attack_sharded(folder: str) -> list[float]:
    settings = {"per_device_train_batch_size": 2, "fsdp": "full_shard"}
    return attack_in_trainer(folder, FastGradient, **settings)


@pytest.mark.parametrize("kind", [FastGradient, ProjectedGradient])
def test_adversarial_training_in_training_step(tmp_path: Path, kind: type[Trainer]) -> None:
    assert attack_in_trainer(tmp_path, kind) == pytest.approx(run_plainly(kind, 4), abs=1e-6)


def test_optimizers_given_and_created(tmp_path: Path) -> None:
    class WithSgd(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.seen_steps = num_training_steps
            self.lr_scheduler = get_constant_schedule(optimizer)
            return self.lr_scheduler

    made = make_trainer(tmp_path / "made", cls=WithSgd)
    made.train()
    assert isinstance(made, WithSgd)
    assert isinstance(made.optimizer, torch.optim.SGD) and made.seen_steps == 8
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = make_trainer(
        tmp_path / "given", model=model, optimizers=(optimizer, get_constant_schedule(optimizer))
    )
    given.train()
    assert given.optimizer is optimizer
    assert read_losses(tmp_path / "given") == read_losses(tmp_path / "made")


@pytest.mark.parametrize("kind", ["polynomial", "cosine_with_restarts", "inverse_sqrt"])
def test_schedules_of_transformers(tmp_path: Path, kind: str) -> None:
    trainer = make_trainer(tmp_path, lr_scheduler_type=kind, warmup_steps=3)
    trainer.train()
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    optimizer = torch.optim.SGD(make_classifier().parameters(), lr=5e-5)
    schedule = get_scheduler(kind, optimizer, 3, 8)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected)


def test_loaders_of_a_subclass(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(make_rows(12), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(make_rows(6), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]

    trainer = make_trainer(tmp_path, cls=Own, train_dataset=None, eval_dataset=None)
    trainer.train()
    assert len(read_losses(tmp_path)) == 6
    assert "eval_accuracy" in trainer.evaluate()


def test_prediction_step_of_a_subclass(tmp_path: Path) -> None:
    class Fixed(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            rows = len(inputs["labels"])
            return None, torch.tensor([[0.0, 1.0]]).repeat(rows, 1), inputs["labels"]

    output = make_trainer(tmp_path, cls=Fixed).predict(make_dataset(13, seed=1))
    assert output.predictions.tolist() == [[0.0, 1.0]] * 13  # type: ignore[union-attr]
    assert output.metrics is not None and "test_loss" not in output.metrics


def test_logits_are_shortened_before_they_are_kept(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        compute_metrics=lambda p: {"accuracy": float((p.predictions == p.label_ids).mean())},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    assert trainer.predict(make_dataset(13, seed=1)).predictions.shape == (13,)  # type: ignore[union-attr]
    assert trainer.evaluate()["eval_accuracy"] == make_trainer(tmp_path).evaluate()["eval_accuracy"]


def test_model_init_builds_a_new_model_for_each_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model_init=make_classifier)
    trainer.train()
    first = read_losses(tmp_path)
    trainer.train()
    assert read_losses(tmp_path) == first


def test_metrics_by_batch_and_what_else_they_may_see(tmp_path: Path) -> None:
    calls: list[tuple[int, bool]] = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float]:
        calls.append((len(prediction.predictions), compute_result))
        assert prediction.inputs.shape[0] == len(prediction.losses) == calls[-1][0]
        return {"seen": float(sum(count for count, _ in calls))}

    trainer = make_trainer(
        tmp_path, compute_metrics=by_batch, batch_eval_metrics=True,
        include_for_metrics=["inputs", "loss"],
    )  # fmt: skip
    assert trainer.evaluate()["eval_seen"] == 13
    assert calls == [(8, False), (5, True)]


# ---- data --------------------------------------------------------------------------------------


def test_columns_that_the_model_does_not_take_are_dropped(tmp_path: Path) -> None:
    seen: set[str] = set()

    def watch(rows: list[dict[str, Any]]) -> Any:
        seen.update(rows[0])
        return collate(rows)

    for data in (make_dataset(8), make_rows(8)):
        seen.clear()
        make_trainer(tmp_path, data_collator=watch, train_dataset=data, num_train_epochs=1).train()
        assert seen == {"input_ids", "label"}
    make_trainer(
        tmp_path, data_collator=watch, remove_unused_columns=False, num_train_epochs=1
    ).train()
    assert {"sentence", "idx"} <= seen


def test_data_without_any_input_is_refused(tmp_path: Path) -> None:
    data = make_dataset(8).select_columns(["sentence", "idx"])
    with pytest.raises(DataError, match="none of the columns of the training data"):
        make_trainer(tmp_path, train_dataset=data).train()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": None}, ConfigurationError, "needs a model, or a model_init"),
        ({"train_dataset": None}, DataError, "training needs a train_dataset"),
        ({"tokenizer": 1, "processing_class": 2}, ConfigurationError, "two names of one thing"),
        (
            {"eval_dataset": None, "eval_strategy": "epoch", "load_best_model_at_end": True},
            ConfigurationError,
            "eval_strategy='epoch' needs an eval_dataset",
        ),
        ({"train_data": 1}, ConfigurationError, "'train_data': did you mean 'train_dataset'"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(tmp_path, **given).train()


def test_a_stream_of_data(tmp_path: Path) -> None:
    stream = make_dataset(40).to_iterable_dataset()
    make_trainer(tmp_path, train_dataset=stream, max_steps=5).train()
    assert len(read_losses(tmp_path)) == 5


def test_the_signature_is_hugging_faces() -> None:
    names = list(inspect.signature(Trainer.__init__).parameters)
    assert names[:5] == ["self", "model", "args", "data_collator", "train_dataset"]


def test_evaluation_needs_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="evaluation needs an eval_dataset"):
        make_trainer(tmp_path, eval_dataset=None).evaluate()


def test_a_fractional_warm_up_is_rounded_up_to_whole_updates(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=5, warmup_steps=0.3, learning_rate=1.0)
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    expected = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=5)
    wanted = []
    for _ in range(5):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        expected.step()
    assert rates == pytest.approx(wanted)


def test_a_trainer_that_is_gone_frees_its_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    call_with_count(partial(trainer.compute_loss), trainer.model, collate(make_rows(4)), count=None)
    kept, model = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert kept() is None and model() is None


def test_an_error_inside_model_init_is_not_hidden(tmp_path: Path) -> None:
    calls = []

    def make(*ignored: Any) -> Any:
        calls.append(ignored)
        raise TypeError("the user's own mistake")

    with pytest.raises(TypeError, match="the user's own mistake"):
        make_trainer(tmp_path, model_init=make)
    assert calls == [()]
    trainer = make_trainer(tmp_path, model_init=lambda trial: make_classifier())
    assert trainer.model is not None


def test_the_verbs_of_an_accelerator_in_a_subclass(tmp_path: Path) -> None:
    class Gathers(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            accelerator = self.accelerator
            accelerator.wait_for_everyone()
            assert accelerator.unwrap_model(model) is self.model
            assert accelerator.is_main_process and accelerator.num_processes == 1
            gathered = accelerator.gather_for_metrics({"labels": [inputs["labels"]]})
            assert torch.equal(gathered["labels"][0], inputs["labels"])
            rows = len(inputs["labels"])  # 5 in the last batch of 8
            repeated = torch.ones(()).repeat(self.args.eval_batch_size)
            assert len(accelerator.gather_for_metrics(repeated)) == rows
            assert accelerator.gather_for_metrics(["text"] * 8) == ["text"] * rows
            return super().prediction_step(model, inputs, *rest, **named)

    assert "eval_loss" in make_trainer(tmp_path, Gathers).evaluate()


def test_small_questions_about_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, learning_rate=1e-3, lr_scheduler_type="constant")
    with pytest.raises(RapidformerError, match="no optimizer yet"):
        trainer.get_learning_rates()
    trainer.train()
    assert trainer.get_learning_rates() == [1e-3, 1e-3]
    bias = trainer.model.classifier.bias
    assert trainer.get_optimizer_group(bias)["weight_decay"] == 0.0
    assert trainer.get_total_train_batch_size() == 4
    assert trainer.num_examples(trainer.get_eval_dataloader()) == 13
    assert trainer.get_num_trainable_parameters() == trainer.model.num_parameters()


class StubHub:
    """What ``push_to_hub`` asks of ``huggingface_hub.HfApi``."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("login", {"token": token}))

    def create_repo(self, name: str, **options: Any) -> Any:
        self.calls.append(("create_repo", {"name": name, **options}))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options: Any) -> str:
        folder = Path(options["folder_path"])
        left_out = options["ignore_patterns"]
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        sent = [f for f in files if not any(fnmatch(f, p) for p in left_out)]
        self.calls.append(("upload_folder", {**options, "sent": sorted(sent)}))
        return "https://hub/me"


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StubHub.calls.clear()
    monkeypatch.setattr("huggingface_hub.HfApi", StubHub)
    trainer = make_trainer(
        tmp_path / "mine", max_steps=2, save_steps=1, push_to_hub=True, hub_token="secret",
        hub_private_repo=True, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    (_, login), (_, created), (_, uploaded) = StubHub.calls
    assert login == {"token": "secret"}
    assert created == {"name": "mine", "private": True, "exist_ok": True}
    assert uploaded["repo_id"] == "me/mine" and uploaded["commit_message"] == "End of training"
    assert {"config.json", "model.safetensors", "README.md"} <= set(uploaded["sent"])
    assert not any("iter_" in name or "secret" in name for name in uploaded["sent"])
    text = (tmp_path / "mine" / "training_args.json").read_text()
    assert "secret" not in text
    assert trainer.push_to_hub(commit_message="again", blocking=False) == "https://hub/me"
    assert StubHub.calls[-1][1]["run_as_future"] is True


def test_tf32_is_the_trainers_own(tmp_path: Path) -> None:
    seen = []

    class Looking(TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            seen.append(torch.get_float32_matmul_precision())

    before = torch.get_float32_matmul_precision()
    trainer = make_trainer(tmp_path, tf32=before == "highest", max_steps=1)
    trainer.add_callback(Looking())
    trainer.train()
    assert seen == ["high" if before == "highest" else "highest"]
    trainer.engine.close()
    assert torch.get_float32_matmul_precision() == before
