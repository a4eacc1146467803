"""A ``Trainer`` whose data, loss and metrics are a task's: what the dialects of TRL and
sentence-transformers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import EvalLoopOutput

from rapidformer.dialects.huggingface.interface import Keys
from rapidformer.dialects.huggingface.trainer import Trainer
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.tasks.base import PreparedData, Task
from rapidformer.tasks.evaluation.evaluating import measure

_NOT_TAKEN = ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
_NOT_CALLED = (
    "compute_loss", "training_step", "prediction_step", "_compute_loss", "get_batch_loss_metrics",
    "concatenated_forward", "dpo_loss", "kto_loss", "tokenize_row", "_prepare_dataset",
    "_get_per_token_logps", "_generate_and_score_completions", "collect_features",
)  # fmt: skip
"""Methods of a trainer whose loss and rows are the script's."""


class TaskTrainer(Trainer):
    """A trainer of rows, not of batches."""

    task: Task
    prepared: PreparedData
    smooths_labels = False

    def __init__(self, *positional: Any, **named: Any) -> None:
        name = type(self).__name__
        problems = [
            f"{name}({given}=...) is not supported: loss and metrics are the task's, and no "
            "predictions are kept. Use a callback's on_evaluate, or rapidformer.Trainer."
            for given in _NOT_TAKEN
            if named.get(given) is not None
        ]
        kinds = [kind for kind in type(self).__mro__ if not _is_ours(kind)]
        problems += [
            f"{kind.__name__}.{method} would not be called: the rows and the loss are the task's. "
            "Use rapidformer.Trainer for a loss of your own."
            for kind in kinds
            for method in _NOT_CALLED
            if method in vars(kind)
        ]
        raise_problems(problems)
        super().__init__(*positional, **named)

    @abstractmethod
    def prepare_tables(self, tables: Mapping[str, Any]) -> PreparedData:
        """Tokenize the rows of these splits, of which there is at least one."""

    def prepare_data(self) -> None:
        """Replace the rows of the script by tokenized ones; several evaluation sets come later."""
        splits = {"train": self.train_dataset, "validation": self.eval_dataset}
        has_several = isinstance(self.eval_dataset, Mapping)
        if has_several:
            del splits["validation"]
        self.prepared = self._prepare(splits)
        self.train_dataset, self.data_collator = self.prepared.train, self.prepared.collate
        if not has_several:
            self.eval_dataset = self.prepared.validation

    def _prepare(self, splits: Mapping[str, Any]) -> PreparedData:
        tables = {name: rows for name, rows in splits.items() if rows is not None}
        if not tables:
            raise ConfigurationError(f"{type(self).__name__} needs a train_dataset.")
        for name, rows in tables.items():
            if not hasattr(rows, "__len__") or not len(rows):
                problem = "is empty" if hasattr(rows, "__len__") else "is a stream"
                raise ConfigurationError(f"the {name} data {problem}: give a table of rows.")
        return self.prepare_tables(tables)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = []  # the collate function reads rows, not the model

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            eval_dataset = self._prepare({"validation": eval_dataset}).validation
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return super().get_test_dataloader(self._prepare({"validation": test_dataset}).validation)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Keys = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The task's metrics, each row once; there are no predictions."""
        engine = self.engine
        loader = engine.data.adopt_loader(dataloader, is_training=False)
        prepared = self.complete(self.prepared)
        with self._evaluating():
            tally = measure(engine, self.task, self.model, loader, prepared, "validation")
            metrics = {**tally.compute(), **self.measure_more()}
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, named, tally.examples)

    def complete(self, prepared: PreparedData) -> PreparedData:
        """The data with what an evaluation needs besides."""
        return prepared

    def measure_more(self) -> Mapping[str, float]:
        """Metrics besides the task's."""
        return {}


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("rapidformer.")
