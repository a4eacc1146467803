"""Finetuner and PreTrainer: their hooks, and what a run leaves in its folder."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from rapidformer import Finetuner, PreTrainer, Pretrainer, RapidformerEngine, get_args, get_timers
from rapidformer.errors import CheckpointError, ConfigurationError, DataError, RapidformerError
from rapidformer.log import warn_once
from tests.processes import run_in_kept_processes


class Regression(nn.Module):
    """Learns y = 2x: the loss is a mean over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((self.layer(x).squeeze(-1) - labels) ** 2).mean()


def make_rows(count: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [{"x": x.reshape(1), "labels": 2 * x} for x in torch.rand(count)]


class LineFinetuner(Finetuner):
    def train_valid_test_datasets_provider(self) -> Any:
        return make_rows(40), make_rows(13), None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        return Regression(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch)

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        assert isinstance(model, list) and len(model) == 1
        seen = torch.cat([self.gather(batch["labels"]) for batch in eval_dataloader])
        losses = torch.stack([model[0](**batch) for batch in eval_dataloader])
        return {"error": float(losses.mean()), "examples": len(seen)}


class LinePreTrainer(PreTrainer):
    requested: list[int]

    def train_valid_test_datasets_provider(self, train_val_test_num_samples: list[int]) -> Any:
        self.requested = train_val_test_num_samples
        return make_rows(train_val_test_num_samples[0]), make_rows(16), None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        return Regression(), None, None

    def run_forward_step(self, data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator))


def make_engine(**settings: Any) -> RapidformerEngine:
    values = {
        "micro_batch_size": 4,
        "lr": 0.05,
        "log_level": "error",
        "optimizer": "sgd",
        "save": "none",
    }
    return RapidformerEngine(args={**values, **settings})


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_finetuner_evaluates_and_saves_after_each_epoch(tmp_path: Path) -> None:
    result = LineFinetuner(make_engine(epochs=3, save=str(tmp_path), log_interval=5)).train()
    lines = read_lines(tmp_path)
    evaluations = [line for line in lines if "eval_error" in line]
    assert [line["step"] for line in evaluations] == [10, 20, 30]
    assert result["error"] == evaluations[-1]["eval_error"] < evaluations[0]["eval_error"]
    assert result["examples"] == 13
    assert [p.name for p in sorted(tmp_path.glob("iter_*"))] == [
        "iter_0000010", "iter_0000020", "iter_0000030",
    ]  # fmt: skip
    assert (tmp_path / "best" / "model.safetensors").is_file()
    assert (tmp_path / "last" / "model.safetensors").is_file()
    assert list((tmp_path / "tensorboard").glob("events*"))
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 5, 10, 15, 20, 25, 30]
    assert training[-1]["loss"] < training[0]["loss"]


def test_labels_that_are_all_ignored_are_refused() -> None:
    class Ignored(LineFinetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            rows = [{"x": torch.ones(2), "labels": torch.tensor([-100, -100])}] * 8
            return rows, None, None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model.layer(batch["x"][:, :1]).mean()

    with pytest.raises(DataError, match=r"all labels of the first batch are ignored \(-100\)"):
        Ignored(make_engine(epochs=1)).train()


def test_finetune_is_train(tmp_path: Path) -> None:
    assert LineFinetuner(make_engine(epochs=1)).finetune()["examples"] == 13


def test_every_example_is_evaluated_once_on_three_processes() -> None:
    """13 examples in batches of 4 on 3 processes: the last round has fillers."""
    for result in run_in_kept_processes(_finetune_line, 3):
        assert result["examples"] == 13


def _finetune_line() -> dict[str, float]:
    return LineFinetuner(make_engine(epochs=1)).train()


def test_best_follows_the_metric_asked_for(tmp_path: Path) -> None:
    class GetsWorse(LineFinetuner):
        calls = 0

        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            type(self).calls += 1
            return {"accuracy": 1.0 / self.calls, "loss": float(self.calls)}

    for metric, step in (("accuracy", 10), ("loss", 10), (None, 10)):
        GetsWorse.calls = 0
        folder = tmp_path / str(metric)
        GetsWorse(make_engine(epochs=3, save=str(folder), metric_for_best_model=metric)).train()
        saved = json.loads((folder / "iter_0000030" / "run.json").read_text())
        assert saved["extra"]["progress"]["best_step"] == step


def test_a_finetuner_evaluates_its_test_data_at_the_end() -> None:
    class WithTest(LineFinetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            return make_rows(40), make_rows(13), make_rows(7), None

    metrics = WithTest(make_engine(epochs=1)).train()
    assert (metrics["examples"], metrics["test_examples"]) == (13, 7)


def test_a_hook_may_return_a_weight_or_megatrons_pair() -> None:
    class WithWeight(LineFinetuner):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch), len(batch["labels"])

    class WithFunction(LineFinetuner):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch), lambda output: (output * 1.0, {"lm loss": output})

    results = [
        cls(make_engine(epochs=1)).train() for cls in (LineFinetuner, WithWeight, WithFunction)
    ]
    assert results[0] == results[1] == results[2]


def test_rows_of_different_lengths_without_labels_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Custom(LineFinetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            rows = [{"idx": torch.ones(2 + i // 2, dtype=torch.long)} for i in range(4)]
            return rows, None, None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            loss = model.layer(batch["idx"].float().mean()[None]).sum()
            return (loss, batch["idx"].numel()) if self.is_weighted else loss

    warn_once.cache_clear()
    for Custom.is_weighted in (True, False):
        assert "weighted by their rows" not in capsys.readouterr().err
        settings = {"micro_batch_size": 2, "global_batch_size": 4, "dataloader_type": "single"}
        Custom(make_engine(epochs=1, log_level="warning", **settings)).train()
    assert "micro-batches are weighted by their rows" in capsys.readouterr().err


def test_own_optimizer_and_schedule_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    class OwnOptimizer(LineFinetuner):
        def model_optimizer_lr_scheduler_provider(self) -> Any:
            model = Regression()
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)

    engine = make_engine(epochs=1, log_level="info")
    OwnOptimizer(engine).train()
    assert "; lr 0.3, StepLR; Adagrad, clip 1.0" in capsys.readouterr().err
    assert isinstance(engine.updates.optimizer, torch.optim.Adagrad)
    assert engine.updates.get_learning_rate() == pytest.approx(0.3 * 0.5**2)


def test_pretrainer_asks_for_megatrons_numbers_of_samples(tmp_path: Path) -> None:
    engine = make_engine(
        train_iters=25, eval_interval=10, eval_iters=2, global_batch_size=8, save=str(tmp_path)
    )
    trainer = LinePreTrainer(engine)
    result = trainer.train()
    assert trainer.requested == [25 * 8, 3 * 2 * 8, 2 * 8]
    steps = [line["step"] for line in read_lines(tmp_path) if "eval_loss" in line]
    assert steps == [10, 20, 25]
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_the_perplexity_of_bert_is_of_its_words_alone() -> None:
    """Its loss also holds that of the order of sentences, and the forward step returns the sum."""
    valid = make_bert_rows(8)
    trainer = BertPreTrainer(
        make_engine(train_iters=2, eval_iters=1, eval_interval=2, global_batch_size=8)
    )
    result = trainer.train()
    batch = {name: torch.stack([row[name] for row in valid]) for name in valid[0]}
    with torch.no_grad():
        logits = trainer.bert.eval()(input_ids=batch["input_ids"]).prediction_logits
    words = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert result["lm_loss"] == pytest.approx(float(words), abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(words), rel=1e-4)
    assert result["loss"] > result["lm_loss"] + 0.1
    # A slice of the layers, blocks or tokens: the words are counted as they are in one process.
    untrained = measure_untrained_bert({})
    for found in run_in_kept_processes(measure_split_berts, 2):
        assert found == [pytest.approx(untrained, rel=1e-5)] * 3


def make_bert_rows(count: int) -> list[dict[str, Any]]:
    torch.manual_seed(count)
    ids = torch.randint(5, 40, (count, 12))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)
    return [
        {"input_ids": ids[n], "labels": labels[n], "next_sentence_label": torch.tensor(n % 2)}
        for n in range(count)
    ]


class BertPreTrainer(PreTrainer):
    def train_valid_test_datasets_provider(self, counts: list[int]) -> Any:
        return make_bert_rows(16), make_bert_rows(8), None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        from transformers import BertConfig, BertForPreTraining

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.bert = BertForPreTraining(BertConfig(vocab_size=40, intermediate_size=16, **sizes))
        return self.bert, None, None

    def run_forward_step(self, data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator))["loss"]


def measure_untrained_bert(settings: dict[str, Any]) -> dict[str, float]:
    engine = make_engine(
        train_iters=1, eval_iters=1, eval_interval=1, global_batch_size=8, lr=0.0, **settings
    )
    result = BertPreTrainer(engine).train()
    engine.close()
    return {name: result[name] for name in ("loss", "lm_loss", "perplexity")}


def measure_split_berts() -> list[dict[str, float]]:
    widths = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return [measure_untrained_bert({width: 2}) for width in widths]


def test_pretrainer_with_the_short_signatures() -> None:
    """The template of the documents: a provider without argument, a step that is handed a batch."""

    class Short(PreTrainer):
        def train_valid_test_datasets_provider(self) -> Any:  # type: ignore[override]
            return make_rows(40), None, None

        def model_optimizer_lr_scheduler_provider(self) -> Any:
            return Regression(), None, None

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            assert set(batch) == {"x", "labels"}
            return model(**batch)

    engine = make_engine(train_iters=5)
    Short(engine).pretrain()
    assert engine.updates.clock.updates == 5
    assert Pretrainer is PreTrainer


def test_a_step_takes_one_micro_batch_from_its_iterator() -> None:
    class Greedy(LinePreTrainer):
        def run_forward_step(self, data_iterator: Any, model: Any) -> Any:
            next(data_iterator)
            return model(**next(data_iterator))

    with pytest.raises(RapidformerError, match="second batch"):
        Greedy(make_engine(train_iters=2)).train()


def test_a_stream_needs_a_length_and_then_trains() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(make_rows(22))

    class FromStream(LineFinetuner):
        def train_valid_test_datasets_provider(self) -> Any:
            return Stream(), None, None, None

    engine = make_engine(train_iters=9)
    FromStream(engine).train()
    assert engine.updates.clock.updates == 9
    with pytest.raises(ConfigurationError, match="--epochs or --train-iters"):
        FromStream(make_engine()).train()


def test_resuming_from_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        LineFinetuner(make_engine(epochs=1, load=str(tmp_path))).train()
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"weights.safetensors is a file: give a run"):
        LineFinetuner(make_engine(epochs=1, load=str(tmp_path / "weights.safetensors"))).train()


def test_finetune_flag_takes_only_the_weights(tmp_path: Path) -> None:
    LineFinetuner(make_engine(epochs=2, save=str(tmp_path / "first"))).train()
    engine = make_engine(epochs=1, load=str(tmp_path / "first"), finetune=True)
    LineFinetuner(engine).train()
    assert engine.updates.clock.updates == 10, "counted from 0"


def test_the_optimizer_and_random_states_can_be_left_behind(tmp_path: Path) -> None:
    class Draws(LineFinetuner):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            torch.rand(1)  # as dropout would
            return super().run_forward_step(batch, model)

    class Looks(LineFinetuner):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            if not hasattr(self, "found"):
                states = self.engine.updates.optimizer.state.values()
                self.found = (len(states), torch.get_rng_state(), self.engine.updates.clock.updates)
                self.weight = model.layer.weight.detach().clone()
            return super().run_forward_step(batch, model)

    def resume(**settings: Any) -> Any:
        engine = make_engine(
            epochs=2, optimizer="adam", load=str(first), save=str(tmp_path / str(settings)),
            **settings,
        )  # fmt: skip
        template = Looks(engine)
        template.train()
        return template

    first = tmp_path / "first"
    Draws(make_engine(epochs=1, optimizer="adam", save=str(first))).train()
    everything, no_optimizer, no_random_states, only_weights = (
        resume(), resume(load_optim=False), resume(load_rng=False), resume(finetune=True),
    )  # fmt: skip
    for template in (everything, no_optimizer, no_random_states, only_weights):
        assert torch.equal(template.weight, everything.weight)
    assert [t.found[0] for t in (everything, no_optimizer, no_random_states, only_weights)] == [
        2, 0, 2, 0,
    ]  # fmt: skip
    assert [t.found[2] for t in (everything, no_optimizer, no_random_states, only_weights)] == [
        10, 10, 10, 0,
    ]  # fmt: skip
    assert torch.equal(no_optimizer.found[1], everything.found[1])
    assert not torch.equal(no_random_states.found[1], everything.found[1])
    assert not torch.equal(only_weights.found[1], everything.found[1])


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    LineFinetuner(make_engine(epochs=1, save=str(tmp_path))).train()
    before = read_lines(tmp_path)
    engine = make_engine(epochs=1, save=str(tmp_path), load=str(tmp_path))
    LineFinetuner(engine).train()
    assert engine.updates.clock.updates == 10
    assert read_lines(tmp_path) == before


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    LineFinetuner(
        make_engine(epochs=1, save=str(tmp_path), save_interval=2, save_total_limit=2)
    ).train()
    assert [p.name for p in sorted(tmp_path.glob("iter_*"))] == ["iter_0000008", "iter_0000010"]


def test_scripts_can_ask_for_the_current_run() -> None:
    engine = make_engine(epochs=1)
    assert get_args() is engine.args
    get_timers()("epoch").start()
    get_timers()("epoch").stop()
    assert get_timers()("epoch").elapsed() >= 0


def test_processes_that_measure_differently_do_not_part_ways(tmp_path: Path) -> None:
    """A metrics hook without ``gather``: rank 0 decides which model is best."""
    results = run_in_kept_processes(_finetune_with_own_numbers, 2, str(tmp_path))
    assert results[0] == results[1] == {"accuracy": 1.0}
    assert (tmp_path / "best").is_dir()


def _finetune_with_own_numbers(folder: str) -> dict[str, float]:
    class Disagrees(LineFinetuner):
        def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
            return {"accuracy": 1.0 - self.args.rank}

    return Disagrees(make_engine(epochs=2, save=folder)).train()


def test_skipped_updates_trigger_nothing(tmp_path: Path) -> None:
    """fp16 overflows in the first updates: no evaluation at step 0, no early exit."""

    class Overflows(LineFinetuner):
        calls = 0

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            type(self).calls += 1
            return model(**batch) * (float("inf") if self.calls <= 3 else 1.0)

    engine = make_engine(
        epochs=1, save=str(tmp_path), fp16=True, eval_interval=4, log_interval=1, exit_interval=4
    )
    with pytest.raises(RapidformerError, match="inf at step 1"):
        Overflows(engine).train()  # an infinite *loss* is no overflow of the gradient

    class GradientOverflows(LineFinetuner):
        calls = 0

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            type(self).calls += 1
            loss = model(**batch)
            if self.calls <= 3:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss

    engine = make_engine(
        epochs=1, save=str(tmp_path / "second"), fp16=True, eval_interval=4, exit_interval=4
    )
    GradientOverflows(engine).train()
    assert engine.updates.clock.skipped == 3 and engine.updates.clock.updates == 4
    steps = [line["step"] for line in read_lines(tmp_path / "second") if "eval_error" in line]
    assert steps == [4]


def test_the_best_model_of_another_folder_is_not_claimed(tmp_path: Path) -> None:
    LineFinetuner(make_engine(epochs=1, save=str(tmp_path / "a"))).train()
    engine = make_engine(epochs=2, save=str(tmp_path / "b"), load=str(tmp_path / "a"))
    LineFinetuner(engine).train()
    saved = json.loads((tmp_path / "b" / "iter_0000020" / "run.json").read_text())
    assert saved["extra"]["progress"]["best_step"] == 20
    assert (tmp_path / "b" / "best").is_dir()


def test_a_pair_of_loss_and_logits_is_refused() -> None:
    class WithLogits(LineFinetuner):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            return model(**batch), torch.rand(4, 2)

    with pytest.raises(RapidformerError, match="second item must be"):
        WithLogits(make_engine(epochs=1)).train()


def test_a_run_that_died_after_its_last_checkpoint_is_finished(tmp_path: Path) -> None:
    LineFinetuner(make_engine(epochs=1, save=str(tmp_path))).train()
    shutil.rmtree(tmp_path / "last")
    engine = make_engine(epochs=1, save=str(tmp_path), load=str(tmp_path))
    LineFinetuner(engine).train()
    assert engine.updates.clock.updates == 10
    assert (tmp_path / "last").is_dir()


def test_a_checkpoint_knows_the_evaluation_of_its_own_step(tmp_path: Path) -> None:
    """Saved by its interval first, evaluated at the end of the epoch next."""
    LineFinetuner(make_engine(epochs=2, save=str(tmp_path), save_interval=5)).train()
    engine = make_engine(epochs=3, lr=0.0, save=str(tmp_path / "next"))
    finetuner = LineFinetuner(engine)
    finetuner.train()
    extra = engine.load_checkpoint(tmp_path / "iter_0000010")
    assert extra["progress"]["evaluated_at"] == 10
    assert extra["progress"]["best_step"] == 10
