"""``SentenceTransformerTrainer`` on Hugging Face's ``Trainer``: what it learns is the task's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rapidformer.config import Settings
from rapidformer.dialects.huggingface.task_trainer import TaskTrainer
from rapidformer.dialects.sentence_transformers.arguments import (
    SentenceTransformerTrainingArguments,
)
from rapidformer.dialects.sentence_transformers.losses import Loss
from rapidformer.dialects.sentence_transformers.model import take_parts
from rapidformer.errors import ConfigurationError
from rapidformer.objectives import Objective
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.embedding.columns import PairColumns
from rapidformer.tasks.embedding.embedding import Embedding
from rapidformer.tasks.embedding.files import DOCUMENT, QUERY
from rapidformer.tasks.rows.rows import get_column_names
from rapidformer.tasks.text.text import TextParts

_LABELS = ("label", "labels", "score", "scores")


class SentenceTransformerTrainer(TaskTrainer):
    """Trains a SentenceTransformer on texts: columns count by their order, as in its own."""

    room = "rapidformer.dialects.sentence_transformers"
    args: SentenceTransformerTrainingArguments
    task: Embedding

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
        """``evaluator`` (or several) is called with the model after each evaluation. Without a
        ``loss``, it is CoSENT for texts with scores, and otherwise a ranking."""
        loss = Loss() if loss is None else loss
        if not isinstance(loss, Loss):
            raise ConfigurationError(
                f"loss= takes one of {self.room}.losses, got {type(loss).__name__}: import it from "
                "there."
            )
        if data_collator is not None or isinstance(train_dataset, Mapping):
            given = "data_collator=" if data_collator is not None else "several train_datasets"
            raise ConfigurationError(f"SentenceTransformerTrainer does not take {given}.")
        self.task, self._loss, self._sentences = Embedding(), loss, model
        evaluators = evaluator if isinstance(evaluator, list) else [evaluator]
        self._evaluators = [evaluate for evaluate in evaluators if evaluate is not None]
        self._parts = take_parts(model)
        args = args if args is not None else SentenceTransformerTrainingArguments("trainer_output")
        super().__init__(
            model=self._parts.transformer, args=args, train_dataset=train_dataset,
            eval_dataset=eval_dataset, data_collator=list, **others,
        )  # fmt: skip
        self.prepare_data()
        self.processing_class = self.prepared.saved

    def prepare_tables(self, tables: Mapping[str, Any]) -> PreparedData:
        """Tokenize rows, as the task does its own."""
        names = get_column_names(next(iter(tables.values())))
        texts = [name for name in names if name not in _LABELS]
        if len(texts) < 2:
            raise ConfigurationError(
                f"the data has the columns {', '.join(names)}: it needs at least two of texts."
            )
        score = next((name for name in names if name in _LABELS), None)
        query, positive, *negatives = texts
        columns = PairColumns(
            query=query, positive=positive, negatives=tuple(negatives), score=score
        )
        model: Any = self.model
        _, tokenizer, recipe, length = self._parts
        parts = TextParts(model.config, tokenizer, length, self.build_settings())
        recipe = replace(recipe, prompts={**recipe.prompts, **self._read_prompts(texts)})
        return self.task.prepare_tables(parts, recipe, tables, columns)

    def _read_prompts(self, texts: list[str]) -> dict[str, str]:
        """The prompts of the arguments, by what they are put before."""
        prompts = self.args.prompts or {}
        if isinstance(prompts, str):
            prompts = dict.fromkeys(texts, prompts)
        first, *others = (prompts.get(name) for name in texts)
        if len({*others}) > 1 or not prompts.keys() <= {*texts}:
            raise ConfigurationError(
                f"prompts={prompts!r}: name the columns of texts ({', '.join(texts)}), and give "
                "all but the first the same prompt."
            )
        named = {QUERY: first, DOCUMENT: others[0]}
        return {name: text for name, text in named.items() if text is not None}

    def build_settings(self) -> Settings:
        return super().build_settings().replace(
            type(self._loss).__name__, task="embedding", mask_duplicates=self.args.masks_duplicates,
            **self._loss.settings,
        )  # fmt: skip

    def build_objective(self) -> Objective | None:
        return self.prepared.objective

    def measure_more(self) -> dict[str, float]:
        """What the evaluators say."""
        metrics: dict[str, float] = {}
        for evaluate in self._evaluators:
            result = evaluate(self._sentences)
            metrics |= result if isinstance(result, Mapping) else {"evaluator": result}
        return metrics
