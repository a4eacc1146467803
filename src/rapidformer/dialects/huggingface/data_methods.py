"""The loaders of ``Trainer``, which a subclass may override."""

from __future__ import annotations

from typing import Any

from rapidformer.dialects.huggingface.columns import ColumnFilter
from rapidformer.dialects.huggingface.interface import TrainerInterface
from rapidformer.errors import DataError


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
