"""The loaders of ``Trainer``, with the columns that the model's ``forward`` takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.errors import DataError
from rapidformer.log import say_once

_LABEL_COLUMNS = ("label", "label_ids")


def _get_forward(model: nn.Module) -> inspect.Signature:
    """The signature of the model itself, under an adapter as well."""
    get_base: Any = getattr(model, "get_base_model", None)
    inner = get_base() if get_base is not None else model
    return inspect.signature(inner.forward)


def find_label_names(model: nn.Module) -> list[str]:
    """The inputs that are labels: what transformers' ``find_labels`` looks for."""
    names = list(_get_forward(model).parameters)
    if "QuestionAnswering" in type(model).__name__:
        return [n for n in names if "label" in n or n in ("start_positions", "end_positions")]
    return [name for name in names if "label" in name]


class ColumnFilter:
    """Drops the columns that a model does not take, and says once which."""

    def __init__(self, model: nn.Module, label_names: list[str]) -> None:
        parameters = _get_forward(model).parameters
        self._model_name = type(model).__name__
        self._kept = [*parameters, *_LABEL_COLUMNS, *label_names]
        # A model that takes anything says nothing about the columns.
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = [
            n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        self._is_open = takes_all and not set(named) & {"input_ids", "pixel_values", *label_names}

    def filter_dataset(self, dataset: Any, what: str) -> Any:
        """A ``datasets`` data set without the other columns; any other kind as it is."""
        names = getattr(dataset, "column_names", None)
        if self._is_open or not names or not hasattr(dataset, "remove_columns"):
            return dataset
        dropped = [name for name in names if name not in self._kept]
        if len(dropped) == len(names):
            raise DataError(
                f"none of the columns of the {what} data ({', '.join(names)}) is an input of "
                f"{self._model_name}.forward. Tokenize the data first, or pass "
                "TrainingArguments(remove_unused_columns=False) with a data_collator that makes "
                "the inputs."
            )
        if dropped:
            say_once(
                f"{what} data: {', '.join(dropped)} left out, {self._model_name} does not take "
                f"{'them' if len(dropped) > 1 else 'it'}"
            )
        return dataset.remove_columns(dropped)

    def filter_rows(self, collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A collate function that sees rows without the other columns."""
        return collate if self._is_open else FilteringCollate(collate, self._kept)


class FilteringCollate:
    """Named, not a closure: loader workers must be able to pickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any], kept: list[str]) -> None:
        self._collate = collate
        self._kept = frozenset(kept)

    def __call__(self, rows: list[Any]) -> Any:
        if rows and isinstance(rows[0], Mapping):
            rows = [{name: row[name] for name in row if name in self._kept} for row in rows]
        return self._collate(rows)


def choose_collator(processor: Any) -> Callable[[list[Any]], Any]:
    """What makes batches where the user does not say: padding by the tokenizer, or stacking."""
    from transformers import DataCollatorWithPadding, default_data_collator

    if hasattr(processor, "pad"):
        collate: Callable[[list[Any]], Any] = DataCollatorWithPadding(processor)
        return collate
    return default_data_collator  # type: ignore[no-any-return]


class DataMethods(TrainerInterface):
    """The part of ``Trainer`` that reads data."""

    def get_train_dataloader(self) -> Any:
        """The training data as a loader; a subclass may return any torch ``DataLoader``."""
        if self.train_dataset is None:
            raise DataError("Trainer: training needs a train_dataset.")
        is_shuffled = self.engine.args.dataloader_type != "single"
        return self._build_loader(self.train_dataset, "training", shuffle=is_shuffled)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Evaluation data as a loader, by itself or by its name among several."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise DataError("Trainer: evaluation needs an eval_dataset.")
        return self._build_loader(dataset, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Data to predict on as a loader."""
        return self._build_loader(test_dataset, "test")

    def _build_loader(self, dataset: Any, what: str, *, shuffle: bool = False) -> Any:
        collate, is_training = self.data_collator, what == "training"
        if self.args.remove_unused_columns:
            columns = ColumnFilter(self.model, self.label_names)
            dataset = columns.filter_dataset(dataset, what)
            collate = columns.filter_rows(collate)
        return self.engine.data.build_loader(
            dataset,
            collate,
            shuffle=shuffle,
            batch_size=None if is_training else self.engine.args.eval_micro_batch_size,
            is_training=is_training,
        )
