"""``PreTrainer``: three hooks train a model for a number of updates.

    class MyPreTrainer(PreTrainer):
        def train_valid_test_datasets_provider(self, train_val_test_num_samples): ...
        def model_optimizer_lr_scheduler_provider(self): ...
        def run_forward_step(self, data_iterator, model): ...

    MyPreTrainer(engine=RapidformerEngine()).train()

The forward step gets an iterator, or the batch itself if its parameter is called ``batch``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.nn import functional

from rapidformer.data.batch import IGNORED_LABEL
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.update import Mean, MicroBatch
from rapidformer.dist.whole import join_whole
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError
from rapidformer.objectives.loss_function import SingleBatch
from rapidformer.overlay import extend, remove
from rapidformer.training.evaluation import Evaluation, Metrics
from rapidformer.training.meter import WeightedSums
from rapidformer.training.template import (
    Template,
    _missing_hook,
    accepts_arguments,
    unpack_datasets,
)
from rapidformer.training.timetable import count_updates

_EVAL_INTERVAL = 1000
ORDER_LABELS = {"next_sentence_label", "sentence_order_label"}


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

    @functools.cached_property
    def _takes_batch(self) -> bool:
        return next(iter(inspect.signature(self.run_forward_step).parameters), "") == "batch"

    def wrap_batch(self, batch: Any) -> Any:
        return batch if self._takes_batch else SingleBatch(batch)

    def get_datasets(self) -> tuple[Any, Any, Any, Any]:
        hook: Any = self.train_valid_test_datasets_provider
        provided = hook(self.count_samples()) if accepts_arguments(hook, 1) else hook()
        return unpack_datasets(provided)

    def count_samples(self) -> list[int]:
        """The number of training, validation and test samples of the run."""
        args = self.args
        train_iters = self.engine.data.get_train_iters()
        if train_iters is None:
            raise ConfigurationError(
                "give the length of training: --train-iters, --train-samples or --train-tokens."
            )
        interval = count_updates(args.eval_interval or _EVAL_INTERVAL, train_iters)
        samples = args.eval_iters * (args.global_batch_size or 1)
        trained = self.engine.data.batches.count_samples(train_iters)
        return [trained, (train_iters // interval + 1) * samples, samples]

    def build_eval_loader(self, dataset: Any, collate: Any) -> DistributedLoader | None:
        if dataset is None or self.args.eval_iters == 0:
            return None
        return self.engine.data.build_loader(dataset, collate, shuffle=False, is_training=False)

    def make_evaluation(self, model: Any, loader: DistributedLoader | None) -> Evaluation | None:
        if loader is None:
            return None
        return self.plan_evaluation(lambda: self.measure_loss(model, loader), _EVAL_INTERVAL)

    def measure_loss(self, model: Any, loader: DistributedLoader) -> Metrics:
        """Loss and perplexity over the first ``--eval-iters`` global batches, always the same."""
        forward = self.make_forward(model)
        rounds = self.args.eval_iters * self.engine.updates.clock.rounds_per_update
        sums = WeightedSums(dtype=torch.float64)
        loader.rewind()
        words = _WordLoss(self.engine)
        with words.watching():
            for micro_batch in islice(loader.iterate_micro_batches(), rounds):
                result = self.engine.updates.weights.run_forward(forward, micro_batch)
                sums.add({**words.take(micro_batch), **result.means})
        means = forward.combine_means(sums.read_means(self.engine.runtime.topology))
        loss = means.pop("loss")
        # A balancing or sentence-order loss says nothing about how well tokens are predicted.
        of_words = means.get("lm_loss", loss)
        if words.is_unknown and "lm_loss" not in means:
            return {"loss": loss, **means}
        return {"loss": loss, **means, "perplexity": math.exp(min(of_words, 700.0))}


class _WordLoss:
    """The loss of the words alone in a model whose loss also holds that of a sentence's order.

    It is computed again from the model's own logits, as its caller sees them: whole on every rank.
    """

    def __init__(self, engine: RapidformerEngine) -> None:
        self._model = engine.model.parallelized.model
        self._mean: Mean | None = None
        self.is_unknown = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls of the model are noticed: not by a hook, which a stage's own call runs."""

        def build(cls: Any) -> dict[str, Any]:
            def call(model: Any, *args: Any, **named: Any) -> Any:
                outputs = cls.__call__(model, *args, **named)
                self._look(named, outputs)
                return outputs

            return {"__call__": call}

        extend(self._model, "recording", build)
        try:
            yield
        finally:
            remove(self._model, "recording")

    def take(self, micro_batch: MicroBatch) -> dict[str, Mean]:
        """Of the micro-batch that the model has just seen."""
        batch, mean, self._mean = micro_batch.batch, self._mean, None
        self.is_unknown |= isinstance(batch, Mapping) and bool(ORDER_LABELS & batch.keys())
        if mean is None:
            return {}
        return {"lm_loss": (mean[0], 0.0 if micro_batch.is_filler else mean[1])}

    def _look(self, named: dict[str, Any], outputs: Any) -> None:
        logits, labels = getattr(outputs, "prediction_logits", None), named.get("labels")
        if logits is None or labels is None or not ORDER_LABELS & named.keys():
            return
        is_word = labels != IGNORED_LABEL
        loss = functional.cross_entropy(
            join_whole(logits)[is_word].float(), labels[is_word], reduction="sum"
        )
        count = is_word.sum()
        self._mean = (loss / count.clamp(min=1), count)
