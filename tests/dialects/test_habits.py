"""What scripts and subclasses do with transformers' ``Trainer``: exact here, or refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import SequentialSampler
from transformers import T5Config, T5ForConditionalGeneration

import rapidformer
from rapidformer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from rapidformer.errors import ConfigurationError
from tests.dialects.small import collate, make_classifier, make_rows
from tests.dialects.test_trainer import make_trainer, read_losses

# ---- overridden methods ------------------------------------------------------------------------


def test_a_sampler_of_a_subclass_decides_the_order(tmp_path: Path) -> None:
    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset)

    make_trainer(tmp_path / "sampler", InOrder, max_steps=5).train()
    make_trainer(tmp_path / "said", max_steps=5, train_sampling_strategy="sequential").train()
    assert read_losses(tmp_path / "sampler") == read_losses(tmp_path / "said")


@pytest.mark.parametrize(
    ("name", "instead"),
    [("_save_checkpoint", "save_model"), ("_inner_training_loop", "training_step"),
     ("get_batch_samples", "get_train_dataloader")],
)  # fmt: skip
def test_a_method_that_is_never_called_is_refused(tmp_path: Path, name: str, instead: str) -> None:
    assert hasattr(transformers.Trainer, name)
    kind = type("Mine", (Trainer,), {name: lambda self, *args, **named: None})
    with pytest.raises(ConfigurationError, match=rf"Mine\.{name}: .* Use .*{instead}"):
        make_trainer(tmp_path, kind)


def test_what_surrounds_a_loss_is_called(tmp_path: Path) -> None:
    calls: list[str] = []

    class Own(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            calls.append("inputs")
            return super()._prepare_inputs(inputs)

        def compute_loss_context_manager(self) -> Any:
            calls.append("context")
            return super().compute_loss_context_manager()

        def _set_signature_columns_if_needed(self) -> None:
            super()._set_signature_columns_if_needed()
            assert self._signature_columns is not None
            self._signature_columns += ["idx"]

        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return ["classifier.weight"]

    def watch(rows: list[dict[str, Any]]) -> Any:
        assert "idx" in rows[0] and "sentence" not in rows[0]
        return collate(rows)

    trainer = make_trainer(tmp_path, Own, max_steps=1, data_collator=watch, weight_decay=0.1)
    trainer.train()
    assert calls == ["inputs", "context"]
    decayed, *others = trainer.optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(2, 16)]
    assert (decayed["weight_decay"], others[0]["weight_decay"]) == (0.1, 0.0)


def test_a_batch_keeps_its_class(tmp_path: Path) -> None:
    """transformers' own collators give a BatchEncoding, whose entries are attributes, too."""

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any
        ) -> Any:
            labels = inputs.labels
            outputs = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    def encode(rows: list[dict[str, Any]]) -> Any:
        return transformers.BatchEncoding(collate(rows))

    trainer = make_trainer(tmp_path / "own", Own, max_steps=2, data_collator=encode)
    trainer.train()
    make_trainer(tmp_path / "plain", max_steps=2).train()
    assert read_losses(tmp_path / "own") == pytest.approx(read_losses(tmp_path / "plain"))
    assert "eval_loss" in trainer.evaluate()


def test_a_model_saved_by_a_subclass_is_part_of_each_checkpoint(tmp_path: Path) -> None:
    class Own(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            assert output_dir is not None and _internal_call
            (Path(output_dir) / "mine.txt").write_text(str(self.state.global_step))

    make_trainer(tmp_path, Own, max_steps=2, save_steps=1).train()
    assert (tmp_path / "checkpoint-1" / "mine.txt").read_text() == "1"
    assert (tmp_path / "checkpoint-2" / "mine.txt").read_text() == "2"


# ---- calls by hand -----------------------------------------------------------------------------


def test_the_accelerator_and_a_step_before_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "hand", max_steps=2)
    assert trainer.accelerator.is_main_process and trainer.accelerator.num_processes == 1
    assert not hasattr(trainer.accelerator, "__deepcopy__") and trainer._engine is None
    batch = collate(make_rows(4))
    loss = trainer.training_step(trainer.model, dict(batch))
    plain = make_classifier()
    expected = plain(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for mine, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    trainer.train()  # the gradients by hand are gone
    make_trainer(tmp_path / "alone", max_steps=2).train()
    assert read_losses(tmp_path / "hand") == read_losses(tmp_path / "alone")


def test_what_is_replaced_after_an_evaluation_is_trained(tmp_path: Path) -> None:
    """As in transformers: the first evaluation decides nothing about the training after it."""

    def flip(rows: list[dict[str, Any]]) -> Any:
        batch = collate(rows)
        return {**batch, "labels": 1 - batch["labels"]}

    def train(name: str, evaluates: bool) -> Trainer:
        trainer = make_trainer(tmp_path / name, max_steps=3)
        if evaluates:
            trainer.evaluate()
        model = make_classifier()
        torch.nn.init.ones_(model.classifier.bias)
        trainer.model, trainer.train_dataset, trainer.data_collator = model, make_rows(9), flip
        if evaluates:
            trainer.evaluate()
        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.train()
        return trainer

    trainer = train("evaluated", evaluates=True)
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    train("fresh", evaluates=False)
    assert read_losses(tmp_path / "evaluated") == read_losses(tmp_path / "fresh")


def test_a_head_that_is_replaced_after_an_evaluation_is_trained(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.model.base_model.requires_grad_(False)
    trainer.evaluate()
    trainer.model.classifier = torch.nn.Linear(16, 2)
    trainer.model.base_model.requires_grad_(True)
    weights = [trainer.model.classifier.weight, trainer.model.get_input_embeddings().weight]
    before = [weight.detach().clone() for weight in weights]
    trainer.train()
    assert not any(map(torch.equal, before, weights))


def test_optimizer_and_schedule_made_by_hand(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "hand", max_steps=3)
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    assert isinstance(optimizer, torch.optim.AdamW)
    trainer.train()
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is not schedule
    make_trainer(tmp_path / "alone", max_steps=3).train()
    assert read_losses(tmp_path / "hand") == read_losses(tmp_path / "alone")


def test_training_again_keeps_the_optimizers_state(tmp_path: Path) -> None:
    """As in transformers: a new schedule, and the moments of before."""
    trainer = make_trainer(tmp_path, max_steps=3, lr_scheduler_type="constant")
    trainer.train()
    first = {k: v.clone() for k, v in _moments(trainer).items()}
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert {float(s["step"]) for s in trainer.optimizer.state.values()} == {6.0}
    # The second run, in a bare loop that goes on with the same moments.
    model = make_classifier()
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    for name, p in model.named_parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0), "exp_avg": first[f"{name}/exp_avg"],
            "exp_avg_sq": first[f"{name}/exp_avg_sq"],
        }  # fmt: skip
    again = make_trainer(tmp_path / "order", max_steps=3)
    for batch, _ in zip(again.get_train_dataloader(), range(3), strict=False):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, dict(trainer.model.named_parameters())[name])


def _moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": trainer.optimizer.state[p][key]
        for name, p in trainer.model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("given", [True, False])
def test_a_schedule_that_looks_at_metrics(tmp_path: Path, given: bool) -> None:
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"patience": 0, "factor": 0.5}
    settings: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": options,
        "optim": "sgd", "learning_rate": 0.1,
    }  # fmt: skip
    if given:
        settings = {"optimizers": (optimizer, ReduceLROnPlateau(optimizer, **options))}
    trainer = make_trainer(
        tmp_path, model=model, max_steps=6, eval_strategy="steps", eval_steps=2,
        compute_metrics=lambda _: {"score": 1.0}, metric_for_best_model="score",
        greater_is_better=False, **settings,
    )  # fmt: skip
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]  # the second score is no better
    assert isinstance(trainer.lr_scheduler, ReduceLROnPlateau)


def test_a_schedule_looks_at_the_loss_if_nothing_else_is_said() -> None:
    for library in (rapidformer, transformers):
        arguments = library.TrainingArguments(
            "out", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", use_cpu=True
        )
        assert arguments.metric_for_best_model == "loss" and arguments.greater_is_better is False


# ---- the same results --------------------------------------------------------------------------


def test_work_and_epoch_are_in_the_metrics(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    metrics = trainer.train().metrics
    seen = [batch["input_ids"].numel() for batch in trainer.get_train_dataloader()]
    work = 6 * sum(seen[:2]) * trainer.model.num_parameters(exclude_embeddings=True)
    assert metrics["total_flos"] == work
    assert metrics["epoch"] == trainer.evaluate()["epoch"] == 0.5


def test_an_own_estimate_of_work_sees_each_batch(tmp_path: Path) -> None:
    class Own(Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            rows, width = inputs["input_ids"].shape
            return int(rows * width**2)

    trainer = make_trainer(tmp_path, Own, max_steps=2)
    widths = [batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()]
    assert trainer.train().metrics["total_flos"] == sum(4 * width**2 for width in widths[:2])


def test_the_history_has_the_lines_that_are_due(tmp_path: Path) -> None:
    """An evaluation, a checkpoint and the end of a run add none, and take nothing from the next."""

    def train(name: str, **settings: Any) -> tuple[dict[int, float], float]:
        trainer = make_trainer(tmp_path / name, max_steps=8, **settings)
        loss = trainer.train().training_loss
        assert trainer.state.num_train_epochs == 2
        lines = [line for line in trainer.state.log_history if "loss" in line]
        return {line["step"]: line["loss"] for line in lines}, loss

    every, mean = train("every", logging_steps=1)
    losses = list(every.values())
    assert mean == pytest.approx(np.mean(losses))
    also: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 2}
    by_step = {3: np.mean(losses[:3]), 6: np.mean(losses[3:6])}
    assert train("steps", logging_steps=3, eval_steps=2, **also)[0] == pytest.approx(by_step)
    lines, loss = train("epoch", logging_strategy="epoch", eval_steps=4, **also)
    assert lines == pytest.approx({4: np.mean(losses[:4]), 8: np.mean(losses[4:])})
    assert loss == pytest.approx(mean)
    lines, loss = train("no", logging_strategy="no", eval_steps=3, **also)
    assert lines == {} and loss == pytest.approx(mean)


def test_metrics_by_batch_get_tensors(tmp_path: Path) -> None:
    def measure(prediction: Any, compute_result: bool) -> dict[str, float]:
        assert isinstance(prediction.predictions, torch.Tensor)
        return {"score": 1.0}

    trainer = make_trainer(tmp_path, compute_metrics=measure, batch_eval_metrics=True)
    assert trainer.evaluate()["eval_score"] == 1.0
    with pytest.raises(ConfigurationError, match="give it the argument compute_result"):
        make_trainer(tmp_path, compute_metrics=lambda p: {}, batch_eval_metrics=True)


class _Pairing(torch.nn.Module):
    """As CLIP: its loss needs no labels, and is returned if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, left: torch.Tensor, return_loss: bool | None = None) -> dict[str, Any]:
        scores = self.factor * left[:, None] * left
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(left)))
        return {"loss": loss, "scores": scores} if return_loss else {"scores": scores}


@pytest.mark.parametrize("asks", [True, False])
def test_a_loss_without_labels_is_evaluated_if_it_is_asked_for(tmp_path: Path, asks: bool) -> None:
    def stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"left": torch.tensor([row["left"] for row in rows]), "return_loss": asks}

    found = []
    for library in (rapidformer, transformers):
        arguments = library.TrainingArguments(
            str(tmp_path / library.__name__), per_device_eval_batch_size=2, use_cpu=True,
            report_to="none", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        rows: Any = [{"left": float(number)} for number in range(3)]
        trainer = library.Trainer(_Pairing(), arguments, stack, eval_dataset=rows)
        found.append(trainer.evaluate().get("eval_loss"))
    assert found[0] == pytest.approx(found[1]) if asks else found == [None, None]


def _make_writer() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def test_generated_rows_have_transformers_width_and_padding(tmp_path: Path) -> None:
    data = [{"input_ids": [5, 6, 7, 1], "labels": [8, 9, 1]} for _ in range(3)]

    def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    found = []
    for trainer_class, arguments_class in (
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
        (transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments),
    ):
        arguments: Any = arguments_class(
            str(tmp_path / trainer_class.__module__), predict_with_generate=True, use_cpu=True,
            generation_max_length=6, disable_tqdm=True, report_to="none",
        )  # fmt: skip
        found.append(
            trainer_class(_make_writer(), arguments, data_collator=stack).predict(data)  # type: ignore[arg-type]
        )
    ours, theirs = found
    assert ours.predictions.tolist() == theirs.predictions.tolist()
    assert ours.label_ids.tolist() == theirs.label_ids.tolist()
    assert -100 not in ours.predictions


def test_the_last_batch_alone_is_dropped(tmp_path: Path) -> None:
    """Of 22 rows, 5 batches remain; the third update of an epoch has one of them."""
    trainer = make_trainer(
        tmp_path, train_dataset=make_rows(22), num_train_epochs=1, dataloader_drop_last=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3
    assert len(trainer.get_train_dataloader()) == 5


def test_a_stream_that_has_a_length_decides_the_schedule(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from make_rows(10)

        def __len__(self) -> int:
            return 10

    trainer = make_trainer(tmp_path, train_dataset=Stream(), num_train_epochs=2, logging_steps=1)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    rates = [line["learning_rate"] / trainer.args.learning_rate for line in lines]
    assert rates == pytest.approx([1 - step / 6 for step in range(6)])
    assert [line["epoch"] for line in lines] == pytest.approx([n / 3 for n in range(1, 7)])


def test_a_stream_may_say_by_an_error_that_it_has_no_length(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from make_rows(10)

        def __len__(self) -> int:
            raise TypeError("a stream")

    trainer = make_trainer(tmp_path, train_dataset=Stream(), eval_dataset=Stream(), max_steps=5)
    trainer.train()
    assert trainer.state.global_step == 5
    assert trainer.evaluate()["eval_loss"] > 0


def test_an_epoch_is_whole_without_the_rows_that_it_drops(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, train_dataset=make_rows(7), eval_dataset=make_rows(4), num_train_epochs=3,
        dataloader_drop_last=True, logging_steps=1, eval_strategy="epoch", eval_delay=2,
    )  # fmt: skip
    result = trainer.train()
    history = trainer.state.log_history
    assert [line["epoch"] for line in history if "loss" in line] == [1.0, 2.0, 3.0]
    assert [line["epoch"] for line in history if "eval_loss" in line] == [2.0, 3.0]
    assert result.metrics["epoch"] == 3.0


def test_there_is_no_best_model_unless_it_is_asked_for(tmp_path: Path) -> None:
    def train(**settings: Any) -> tuple[Any, Any]:
        trainer = make_trainer(
            tmp_path / str(len(settings)), eval_dataset=make_rows(4), eval_strategy="epoch",
            **settings,
        )  # fmt: skip
        trainer.train()
        return trainer.state.best_global_step, trainer.state.best_model_checkpoint

    assert train() == (None, None)
    step, folder = train(metric_for_best_model="loss", save_strategy="no")
    assert step is not None and folder is None


def test_special_tokens_follow_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "<end>": 1, "<fill>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<fill>"
    )
    trainer = make_trainer(tmp_path, max_steps=1, processing_class=tokenizer)
    trainer.train()
    assert (trainer.model.config.eos_token_id, trainer.model.config.pad_token_id) == (1, 2)


def test_optimizers_go_neither_with_model_init_nor_with_a_class(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(make_classifier().parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="override create_optimizer instead"):
        make_trainer(tmp_path, model_init=make_classifier, optimizers=(optimizer, None))
    others: Any = (torch.optim.SGD, {"lr": 0.2})
    with pytest.raises(ConfigurationError, match="both say which optimizer: give one"):
        make_trainer(tmp_path, optimizers=(optimizer, None), optimizer_cls_and_kwargs=others)


def test_smoothed_labels_of_t5_need_no_decoder_inputs(tmp_path: Path) -> None:
    """transformers takes the labels out of the batch, and then lacks what the decoder reads."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model: Any = transformers.T5ForConditionalGeneration(config)
    rows = [
        {"input_ids": [3, 4, 5], "labels": [7, 8, 1]},
        {"input_ids": [5, 6, 7], "labels": [9, 1, -100]},
    ]
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        logits = model(**batch).logits.flatten(0, 1)
    labels = batch["labels"].flatten()
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    trainer = make_trainer(
        tmp_path, model=model, train_dataset=rows, eval_dataset=None, data_collator=lambda _: batch,
        per_device_train_batch_size=2, label_smoothing_factor=0.1, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(expected), abs=1e-6)


def test_callbacks_see_the_last_save_coming(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            seen.extend(["step"] * control.should_save)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            seen.extend(["epoch"] * control.should_save)

        def on_save(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            seen.append("saved")

    make_trainer(tmp_path / "a", max_steps=2, callbacks=[Watch()]).train()
    assert seen == ["step", "saved"]
    seen.clear()
    make_trainer(tmp_path / "b", max_steps=2, save_strategy="epoch", callbacks=[Watch()]).train()
    assert seen == ["epoch", "saved"]


def test_a_complete_run_that_is_resumed_restores_its_callbacks(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "max_steps": 2, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True,
    }  # fmt: skip
    make_trainer(tmp_path, callbacks=[transformers.EarlyStoppingCallback(5)], **settings).train()
    stopping = transformers.EarlyStoppingCallback()
    again = make_trainer(
        tmp_path, callbacks=[stopping], restore_callback_states_from_checkpoint=True, **settings
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert stopping.early_stopping_patience == 5 and again.state.global_step == 2


@pytest.mark.parametrize(
    "settings", [{"weight_decay": 0.1}, {"optim": "adafactor"}], ids=["decay", "adafactor"]
)
def test_a_t5_run_has_transformers_losses_and_norms(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Its table of relative positions is not decayed: "bias" is in its name."""
    draw = np.random.default_rng(0)
    data = [
        {"input_ids": draw.integers(2, 32, 5).tolist(), "labels": draw.integers(2, 32, 4).tolist()}
        for _ in range(16)
    ]

    def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    found = []
    for room in (rapidformer, transformers):
        arguments: Any = room.TrainingArguments(
            str(tmp_path / room.__name__), use_cpu=True, logging_steps=1, learning_rate=5e-3,
            per_device_train_batch_size=4, train_sampling_strategy="sequential", max_steps=6,
            disable_tqdm=True, save_strategy="no", **settings,
        )  # fmt: skip
        trainer: Any = room.Trainer(_make_writer(), arguments, stack, train_dataset=data)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        found.append([(line["loss"], line["grad_norm"]) for line in lines])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
