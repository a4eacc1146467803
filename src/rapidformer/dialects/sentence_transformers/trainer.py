"""``SentenceTransformerTrainer`` on Hugging Face's ``Trainer``: what it learns is the task's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from transformers.trainer_utils import EvalLoopOutput

from rapidformer.config import Settings
from rapidformer.dialects.huggingface.interface import Keys
from rapidformer.dialects.huggingface.trainer import Trainer
from rapidformer.dialects.sentence_transformers.arguments import (
    SentenceTransformerTrainingArguments,
)
from rapidformer.dialects.sentence_transformers.losses import Loss, MultipleNegativesRankingLoss
from rapidformer.dialects.sentence_transformers.model import take_parts
from rapidformer.errors import ConfigurationError
from rapidformer.objectives import Objective
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.embedding.columns import PairColumns
from rapidformer.tasks.embedding.embedding import Embedding
from rapidformer.tasks.evaluation.evaluating import measure
from rapidformer.tasks.rows.rows import get_column_names
from rapidformer.tasks.text.text import TextParts

_LABELS = ("label", "labels", "score", "scores")


class SentenceTransformerTrainer(Trainer):
    """Trains a SentenceTransformer on texts: columns count by their order, as in its own."""

    room = "rapidformer.dialects.sentence_transformers"
    args: SentenceTransformerTrainingArguments

    def __init__(
        self,
        model: Any = None,
        args: SentenceTransformerTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        evaluator: Any = None,
        data_collator: Any = None,
        **others: Any,
    ) -> None:
        """``evaluator`` (or several) is called with the model after each evaluation."""
        loss = MultipleNegativesRankingLoss(model) if loss is None else loss
        if not isinstance(loss, Loss):
            raise ConfigurationError(
                f"loss= takes one of {self.room}.losses, got {type(loss).__name__}: import it from "
                "there."
            )
        if data_collator is not None or isinstance(train_dataset, Mapping):
            given = "data_collator=" if data_collator is not None else "several train_datasets"
            raise ConfigurationError(f"SentenceTransformerTrainer does not take {given}.")
        self._task, self._loss, self._sentences = Embedding(), loss, model
        self._evaluators = [] if evaluator is None else evaluator
        if not isinstance(self._evaluators, list):
            self._evaluators = [self._evaluators]
        self._parts = take_parts(model)
        args = args if args is not None else SentenceTransformerTrainingArguments("trainer_output")
        super().__init__(
            model=self._parts.transformer, args=args, train_dataset=train_dataset,
            eval_dataset=eval_dataset, data_collator=list, **others,
        )  # fmt: skip
        self.prepared = self.prepare_rows({"train": train_dataset, "validation": eval_dataset})
        self.train_dataset, self.eval_dataset = self.prepared.train, self.prepared.validation
        self.data_collator = self.prepared.collate
        self.processing_class = self.prepared.saved

    def prepare_rows(self, splits: Mapping[str, Any]) -> PreparedData:
        """Tokenize rows, as the task does its own."""
        tables = {name: rows for name, rows in splits.items() if rows is not None}
        names = get_column_names(next(iter(tables.values())))
        texts = [name for name in names if name not in _LABELS]
        if len(texts) < 2:
            raise ConfigurationError(
                f"the data has the columns {', '.join(names)}: it needs at least two of texts."
            )
        score = next((name for name in names if name in _LABELS), None)
        columns = PairColumns(
            query=texts[0], positive=texts[1], negatives=tuple(texts[2:]), score=score
        )
        model: Any = self.model
        _, tokenizer, recipe, length = self._parts
        parts = TextParts(model.config, tokenizer, length, self.build_settings())
        prompts = self.args.prompts or {}
        if isinstance(prompts, str):
            prompts = dict.fromkeys(texts, prompts)
        given = {"query": prompts.get(texts[0]), "document": prompts.get(texts[1])}
        kept = {name: text for name, text in given.items() if text is not None}
        recipe = replace(recipe, prompts={**recipe.prompts, **kept})
        return self._task.prepare_tables(parts, tables, columns, recipe)

    def build_settings(self) -> Settings:
        return super().build_settings().replace(
            type(self._loss).__name__, task="embedding", mask_duplicates=self.args.masks_duplicates,
            **self._loss.settings,
        )  # fmt: skip

    def build_objective(self) -> Objective | None:
        return self.prepared.objective

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = []  # the collate function reads rows, not the model

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            eval_dataset = self.prepare_rows({"validation": eval_dataset}).validation
        return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Keys = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The task's metrics, each row once, and those of the evaluators."""
        engine = self.engine
        loader = engine.data.adopt_loader(dataloader, is_training=False)
        with ExitStack() as stack:
            if not self._is_training or self.model.training:
                stack.enter_context(engine.model.evaluating())
            tally = measure(engine, self._task, self.model, loader, self.prepared, "validation")
            metrics = dict(tally.compute())
            for evaluator in self._evaluators:
                metrics |= evaluator(self._sentences)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, named, tally.examples)  # type: ignore[arg-type]
