"""The loaders of ``Trainer``, with the columns that the model's ``forward`` takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers.utils import find_labels

from rapidformer.data.data_source import find_length
from rapidformer.data.loader import DistributedLoader
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.log import say_once
from rapidformer.models.adapters import get_base

_LABEL_COLUMNS = ("label", "label_ids")
Collate = Callable[[list[Any]], Any]


def _get_forward(model: nn.Module) -> inspect.Signature:
    """The signature of the model itself, under an adapter as well."""
    return inspect.signature(get_base(model).forward)


def find_label_names(model: nn.Module) -> list[str]:
    """The inputs that are labels."""
    return find_labels(type(get_base(model)))


def has_loss_without_labels(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model without labels returns a loss if asked, as CLIP does; or by default."""
    asked = inputs.get("return_loss")
    parameter = _get_forward(model).parameters.get("return_loss")
    return bool(asked if asked is not None else parameter is not None and parameter.default is True)


def find_columns(model: nn.Module, label_names: list[str]) -> list[str]:
    """The columns that the model takes; none if it takes anything, and so says nothing of them."""
    parameters = _get_forward(model).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if takes_all and not named & {"input_ids", "pixel_values", *label_names}:
        return []
    return list({**parameters, **dict.fromkeys((*_LABEL_COLUMNS, *label_names))})


def drop_unused_columns(
    dataset: Any, collate: Collate, model: nn.Module, kept: set[str], what: str
) -> tuple[Any, Collate]:
    """The data and a collate function with these columns alone."""
    names = getattr(dataset, "column_names", None)
    if names and hasattr(dataset, "remove_columns"):
        dropped = [name for name in names if name not in kept]
        if len(dropped) == len(names):
            raise DataError(
                f"none of the columns of the {what} data ({', '.join(names)}) is an input of "
                f"{type(model).__name__}.forward. Tokenize the data first, or pass "
                "TrainingArguments(remove_unused_columns=False) with a data_collator that makes "
                "the inputs."
            )
        if dropped:
            say_once(
                f"{what} data: {', '.join(dropped)} left out, {type(model).__name__} does not take "
                f"{'them' if len(dropped) > 1 else 'it'}"
            )
        dataset = dataset.remove_columns(dropped)
    # Not a closure: loader workers must be able to pickle it.
    return dataset, partial(_collate_kept, collate, kept)


def _collate_kept(collate: Collate, kept: set[str], rows: list[Any]) -> Any:
    if rows and isinstance(rows[0], Mapping):
        rows = [{name: row[name] for name in row if name in kept} for row in rows]
    return collate(rows)


def choose_collator(processor: Any) -> Collate:
    """What makes batches where the user does not say: padding by the tokenizer, or stacking."""
    from transformers import DataCollatorWithPadding, default_data_collator

    if hasattr(processor, "pad"):
        return DataCollatorWithPadding(processor)
    return default_data_collator


class DataMethods(TrainerInterface):
    """The part of ``Trainer`` that reads data."""

    _signature_columns: list[str] | None = None

    def _set_signature_columns_if_needed(self) -> None:
        """Note the columns that are kept; a subclass may add to them."""
        if self._signature_columns is None:
            self._signature_columns = find_columns(self.model, self.label_names)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of the training data; a subclass may return any sampler of torch's."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        is_shuffled = self.args.train_sampling_strategy != "sequential"
        return (RandomSampler if is_shuffled else SequentialSampler)(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(eval_dataset)

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
        name = "_get_train_sampler" if is_training else "_get_eval_sampler"
        get, sampler = getattr(self, name), None
        if self.overrides(name):
            sampler = get(dataset) if inspect.signature(get).parameters else get()
        if self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            if kept := set(self._signature_columns or ()):
                dataset, collate = drop_unused_columns(dataset, collate, self.model, kept, what)
        size = None if is_training else self.engine.args.eval_micro_batch_size
        if sampler is not None:
            args = self.args
            batch = args.train_batch_size if is_training else args.eval_batch_size
            drops = is_training and args.dataloader_drop_last
            return DataLoader(
                dataset, batch, sampler=sampler, collate_fn=collate, drop_last=drops,
                num_workers=args.dataloader_num_workers,
            )  # fmt: skip
        return self.engine.data.build_loader(
            dataset, collate, shuffle=shuffle, batch_size=size, is_training=is_training,
            keeps_rounds=True,
        )  # fmt: skip


class _Batches(IterableDataset[Any]):
    """Of any loader: each batch is one sample."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)


def _leave(batch: Any) -> Any:
    return batch


def adopt_loader(engine: RapidformerEngine, loader: Any, *, is_training: bool) -> DistributedLoader:
    """A loader of the trainer's or of torch's, or of any other kind in one process."""
    if isinstance(loader, (DataLoader, DistributedLoader)):
        adopted = engine.data.adopt_loader(loader, is_training=is_training)
        samples = find_length(adopted.dataset)
    else:
        adopted = engine.data.adopt_loader(_make_torchs(engine, loader), is_training=is_training)
        samples = find_length(loader)
    if is_training and adopted.is_stream and samples is not None:
        # A stream that says its length decides how long a run of so many epochs is.
        rounds, rest = divmod(samples, adopted.samples_per_round)
        rounds += bool(rest and engine.args.keep_last)
        updates = -(-rounds // engine.updates.clock.rounds_per_update)
        adopted.updates_per_epoch = max(1, updates)
    return adopted


def _make_torchs(engine: RapidformerEngine, loader: Any) -> DataLoader[Any]:
    kind, replicas = type(loader).__name__, engine.args.data_parallel_size
    if not isinstance(loader, Iterable):
        raise DataError(f"a loader must give batches, got {kind}, which cannot be iterated over.")
    if replicas > 1:
        raise DataError(
            f"a {kind} cannot be divided over {replicas} processes: return a torch DataLoader. For "
            "batches that are made elsewhere, that is DataLoader(dataset, batch_size=None), whose "
            "data set gives all of them on every process."
        )
    return DataLoader(_Batches(loader), batch_size=None, collate_fn=_leave)
