"""Overridden methods on two processes: the losses, weights and metrics of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from rapidformer import Accelerator, Trainer
from rapidformer.errors import RapidformerError
from tests.dialects.small import make_dataset
from tests.dialects.test_trainer import make_trainer, read_losses
from tests.processes import run_in_kept_processes, run_in_processes


def sum_losses(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    return nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum")


class OneProcess(Trainer):
    """A loss for one process."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert return_outputs is False
        return sum_losses(model, inputs) / num_items_in_batch


class ScaledAfter(OneProcess):
    """For transformers: it averages over the processes, and counts the labels of all of them."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert torch.is_tensor(num_items_in_batch)
        loss = sum_losses(model, inputs) / num_items_in_batch.to(self.args.device)
        loss *= self.accelerator.num_processes
        return loss


class ScaledInOne(OneProcess):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        total = self.accelerator.gather(num_items_in_batch).sum()
        return sum_losses(model, inputs) * (self.args.world_size / total)


class Unused(OneProcess):
    """Without the count, a factor is a factor."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return sum_losses(model, inputs) / len(inputs["labels"]) * self.accelerator.num_processes


class OwnLoaders(OneProcess):
    """As in transformers' own methods."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(
            self.train_dataset, self.args.train_batch_size, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


class OwnSampler(OneProcess):
    """As in a script for torchrun."""

    def get_train_dataloader(self) -> Any:
        args = self.args
        return DataLoader(
            self.train_dataset, args.train_batch_size, collate_fn=self.data_collator,
            sampler=DistributedSampler(
                self.train_dataset, args.world_size, args.process_index, shuffle=False
            ),
        )  # fmt: skip


KINDS: list[type[Trainer]] = [OneProcess, ScaledAfter, ScaledInOne, OwnLoaders, OwnSampler, Unused]


def train(folder: str, batch: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    results = []
    for kind in KINDS:
        trainer = make_trainer(
            f"{folder}/{kind.__name__}", kind, per_device_train_batch_size=batch, max_steps=4,
            train_sampling_strategy="sequential", train_dataset=make_dataset(15), optim="sgd",
            learning_rate=0.1, max_grad_norm=0.0, compute_metrics=None, eval_dataset=None,
        )  # fmt: skip
        trainer.train()
        weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        losses = read_losses(Path(f"{folder}/{kind.__name__}"))
        results.append((losses, weights))
    return results


def test_losses_in_transformers_words_are_those_of_one_process(tmp_path: Path) -> None:
    [alone] = run_in_kept_processes(train, 1, str(tmp_path / "one"), 4)
    together, _ = run_in_kept_processes(train, 2, str(tmp_path / "two"), 2)
    expected_losses, expected = alone[0]
    for kind, (losses, weights) in zip(KINDS[:-1], together, strict=False):
        assert losses == pytest.approx(expected_losses, abs=1e-6), kind
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6, msg=kind.__name__)
    assert together[-1][0][0] == pytest.approx(2 * expected_losses[0], abs=1e-6)


class OwnEvaluation(Trainer):
    """A loop of its own, with the verbs of transformers' ``evaluation_loop``."""

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        loader = self.accelerator.prepare(
            DataLoader(self.eval_dataset, 2, collate_fn=self.data_collator)
        )
        model = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        assert model is self.accelerator.unwrap_model(model) is self.model
        rows, logits = [], []
        for batch in loader:
            with torch.no_grad(), self.accelerator.autocast():
                outputs = model(**batch).logits
            padded = self.accelerator.pad_across_processes(batch["input_ids"], dim=1)
            gathered = self.accelerator.gather_for_metrics((padded, outputs))
            rows += gathered[0].sum(1).tolist()
            logits.append(gathered[1])
        return {"rows": rows, "logits": torch.cat(logits).numpy()}  # type: ignore[dict-item]


def evaluate(folder: str) -> tuple[Any, ...]:
    trainer = make_trainer(f"{folder}", OwnEvaluation, eval_strategy="no")
    result: Any = trainer.evaluate()
    accelerator = trainer.accelerator
    other = nn.Linear(2, 2)
    assert accelerator.prepare(other) is other and not trainer.is_fsdp_enabled
    with pytest.raises(RapidformerError, match=r"Return yours there"):
        accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(
        AttributeError, match=r"self\.accelerator of a Trainer has no 'profile_all'"
    ):
        _ = accelerator.profile_all
    facts = accelerator.state.num_processes, str(accelerator.distributed_type)
    return result["rows"], result["logits"], facts, accelerator.sync_gradients


def test_an_evaluation_with_the_accelerators_verbs(tmp_path: Path) -> None:
    [(rows, logits, _, _)] = run_in_kept_processes(evaluate, 1, str(tmp_path / "one"))
    assert len(rows) == 13
    for result in run_in_kept_processes(evaluate, 2, str(tmp_path / "two")):
        assert result[0] == rows and result[2:] == ((2, "MULTI_CPU"), True)
        np.testing.assert_allclose(result[1], logits, atol=1e-5)


class Watching(OneProcess):
    """``sync_gradients`` says which micro-batch completes the gradient."""

    seen: list[bool]

    def training_step(self, *given: Any, **named: Any) -> Any:
        self.seen.append(self.accelerator.sync_gradients)
        with self.accelerator.accumulate(self.model), self.accelerator.no_sync(self.model):
            return super().training_step(*given, **named)


def test_which_micro_batch_completes_a_gradient(tmp_path: Path) -> None:
    Watching.seen = []
    make_trainer(
        tmp_path, Watching, max_steps=2, gradient_accumulation_steps=2,
        train_dataset=make_dataset(),
    ).train()  # fmt: skip
    assert Watching.seen == [False, True] * 2


def train_in_own_group(folder: str) -> tuple[Any, ...]:
    """As in PyTorch's tutorials: no launcher, and nothing in the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, _ = (int(os.environ.pop(name)) for name in names)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    trainer = make_trainer(
        folder, per_device_train_batch_size=2, max_steps=3, optim="sgd", compute_metrics=None,
        train_sampling_strategy="sequential", eval_dataset=None,
    )  # fmt: skip
    args = trainer.args
    facts = args.world_size, args.process_index, args.local_process_index
    trainer.train()
    return *facts, Accelerator(cpu=True).process_index, trainer.model.state_dict()


def test_processes_that_the_script_started_train_together(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path / "one", per_device_train_batch_size=4, max_steps=3, optim="sgd",
        compute_metrics=None, train_sampling_strategy="sequential", eval_dataset=None,
    )  # fmt: skip
    trainer.train()
    results = run_in_kept_processes(train_in_own_group, 2, str(tmp_path / "two"))
    for rank, (*facts, weights) in enumerate(results):
        assert facts == [2, rank, rank, rank]
        torch.testing.assert_close(weights, trainer.model.state_dict(), atol=1e-6, rtol=1e-6)


def wait_at_once(folder: str) -> bool:
    make_trainer(folder).accelerator.wait_for_everyone()
    return dist.is_initialized()


def test_processes_wait_for_each_other_before_training(tmp_path: Path) -> None:
    assert run_in_processes(wait_at_once, 2, str(tmp_path)) == [True, True]
