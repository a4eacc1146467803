"""``PreTrainer``: three hooks, and a model is trained for a number of updates.

    class MyPreTrainer(PreTrainer):
        def train_valid_test_datasets_provider(self, train_val_test_num_samples): ...
        def model_optimizer_lr_scheduler_provider(self): ...
        def run_forward_step(self, data_iterator, model): ...

    MyPreTrainer(engine=RapidformerEngine()).train()

The forward step is handed an iterator, as in Megatron; one whose parameter is called ``batch`` is
handed the batch.
"""

from __future__ import annotations

import functools
import inspect
import math
from itertools import islice
from typing import Any

import torch

from rapidformer.data.loader import DistributedLoader
from rapidformer.dist.collectives import sum_over_processes
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.training.forward import SingleBatch
from rapidformer.training.loop import Evaluation
from rapidformer.training.template import Template, _missing_hook, accepts_arguments

_EVAL_INTERVAL = 1000


class PreTrainer(Template):
    """Template for pre-training."""

    best_metric = "loss"
    greater_is_better = False

    @property
    def is_shuffled(self) -> bool:
        return self.args.dataloader_type == "cyclic"

    def train_valid_test_datasets_provider(self, train_val_test_num_samples: list[int]) -> Any:
        """Hook: ``(train, validation, test)``, and a collate function if wanted."""
        raise _missing_hook(self, "train_valid_test_datasets_provider")

    def pretrain(self) -> dict[str, float]:
        """The same as ``train``."""
        return self.train()

    def wrap_batch(self, batch: Any) -> Any:
        return batch if self._takes_batch else SingleBatch(batch)

    @functools.cached_property
    def _takes_batch(self) -> bool:
        return next(iter(inspect.signature(self.run_forward_step).parameters), "") == "batch"

    def get_datasets(self) -> tuple[Any, Any, Any, Any]:
        hook: Any = self.train_valid_test_datasets_provider
        provided = hook(self._count_samples()) if accepts_arguments(hook, 1) else hook()
        if not isinstance(provided, tuple) or len(provided) not in (3, 4):
            raise RapidformerError(
                "train_valid_test_datasets_provider must return three data sets: training, "
                "validation, test (each may be None)."
            )
        if provided[0] is None:
            raise RapidformerError("train_valid_test_datasets_provider gave no training data.")
        train_data, valid_data, test_data, collate = (*provided, None)[:4]
        return train_data, valid_data, test_data, collate

    def _count_samples(self) -> list[int]:
        """Megatron's numbers of training, validation and test samples."""
        args = self.args
        batch = args.global_batch_size or 1
        train_iters = self.engine.get_train_iters()
        if train_iters is None:
            raise ConfigurationError("how long to train? Give --train-iters or --train-samples.")
        evaluations = train_iters // (args.eval_interval or _EVAL_INTERVAL) + 1
        return [
            train_iters * batch,
            evaluations * args.eval_iters * batch,
            args.eval_iters * batch,
        ]

    def build_eval_loader(self, dataset: Any, collate: Any) -> DistributedLoader | None:
        if dataset is None or self.args.eval_iters == 0:
            return None
        return self.engine.build_data_loader(dataset, collate, shuffle=False, is_training=False)

    def make_evaluation(
        self, model: Any, eval_loader: DistributedLoader | None
    ) -> Evaluation | None:
        if eval_loader is None:
            return None
        forward = self.make_forward(eval_loader, model)
        rounds = self.args.eval_iters * self.engine.clock.rounds_per_update

        def evaluate() -> dict[str, float]:
            # The same first batches every time, so that losses can be compared.
            eval_loader.rewind()
            totals = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
            for batch in islice(eval_loader, rounds):
                result = forward(batch)
                weight = torch.as_tensor(result.weight, dtype=torch.float64, device=totals.device)
                if eval_loader.info.rows:
                    part = result.loss.double() * weight
                    totals += torch.stack([torch.where(weight == 0, weight, part), weight])
            loss_sum, count = sum_over_processes(totals).tolist()
            loss = loss_sum / count if count else math.nan
            return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

        name, greater = self.choose_best_metric()
        return Evaluation(
            run=evaluate,
            interval=self.args.eval_interval or _EVAL_INTERVAL,
            best_metric=name,
            greater_is_better=greater,
        )
