"""sentence-transformers' trainers on Hugging Face's ``Trainer``: what they learn is a task's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from rapidformer.config import Settings
from rapidformer.dialects.huggingface.task_trainer import TaskTrainer
from rapidformer.dialects.sentence_transformers.arguments import (
    PairArguments,
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


class PairTrainer(TaskTrainer):
    """What the trainers of vectors and of scores share: columns count by their order."""

    args: PairArguments
    arguments_class: ClassVar[type[PairArguments]]

    def __init__(
        self,
        model: Any = None,
        args: PairArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        evaluator: Any = None,
        data_collator: Any = None,
        **others: Any,
    ) -> None:
        """``evaluator`` (or several) is called with the model after each evaluation."""
        given = {
            "data_collator=...": data_collator is not None and "texts are tokenized by the trainer",
            "model_init=...": "model_init" in others and "give it a model",
            "several train_datasets": isinstance(train_dataset, Mapping)
            and "join them with datasets.concatenate_datasets",
            "evaluator=... without eval_dataset=...": evaluator is not None
            and eval_dataset is None
            and args is not None
            and args.eval_strategy != "no"
            and "it is asked after each evaluation of rows",
        }
        for what, reason in given.items():
            if reason:
                raise ConfigurationError(f"{type(self).__name__} does not take {what}: {reason}.")
        self._model = model
        transformer = self._take(model)
        self._loss = self._read_loss(loss)
        evaluators = evaluator if isinstance(evaluator, list) else [evaluator]
        self._evaluators = [evaluate for evaluate in evaluators if evaluate is not None]
        super().__init__(
            model=transformer, args=args or self.arguments_class("trainer_output"),
            train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=list, **others,
        )  # fmt: skip
        self.prepare_data()
        self.processing_class = self.prepared.saved or self.prepared.processor

    @abstractmethod
    def _take(self, model: Any) -> nn.Module:
        """The transformer that is trained."""

    @abstractmethod
    def _choose_loss(self) -> Loss:
        """The loss of a script that names none."""

    @abstractmethod
    def _prepare_pairs(self, tables: Mapping[str, Any], columns: PairColumns) -> PreparedData:
        """Tokenize rows with these columns."""

    def _read_loss(self, loss: Any) -> Loss:
        if loss is None:
            return self._choose_loss()
        if callable(loss) and not isinstance(loss, nn.Module):  # a class, or a function
            loss = loss(self._model)
        if isinstance(loss, Loss):
            return loss
        name, room = type(loss).__name__, f"{self.room}.losses"
        known = [
            name
            for name, kind in vars(import_module(room)).items()
            if isinstance(kind, type)
            and issubclass(kind, Loss)
            and not name.startswith("_")
            and kind is not Loss
        ]
        if name in known:
            raise ConfigurationError(f"loss= takes losses of {room}: import {name} from there.")
        raise ConfigurationError(f"loss={name} is not supported: {room} has {', '.join(known)}.")

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
        return self._prepare_pairs(tables, columns)

    def _build_parts(self, tokenizer: Any, length: int) -> TextParts:
        model: Any = self.model
        return TextParts(model.config, tokenizer, length, self.build_settings())

    def build_settings(self) -> Settings:
        name = type(self._loss).__name__
        return super().build_settings().replace(name, task=self.task.name, **self._loss.settings)

    def build_objective(self) -> Objective | None:
        return self.prepared.objective

    def measure_more(self) -> dict[str, float]:
        """What the evaluators say."""
        metrics: dict[str, float] = {}
        for evaluate in self._evaluators:
            result = evaluate(self._model)
            metrics |= result if isinstance(result, Mapping) else {"evaluator": result}
        return metrics


class SentenceTransformerTrainer(PairTrainer):
    """Trains a SentenceTransformer on texts. Without a loss, it is CoSENT for texts with scores,
    and otherwise a ranking."""

    room = "rapidformer.dialects.sentence_transformers"
    arguments_class = SentenceTransformerTrainingArguments
    task: Embedding

    def _take(self, model: Any) -> nn.Module:
        self.task, self._parts = Embedding(), take_parts(model)
        return self._parts.transformer

    def _choose_loss(self) -> Loss:
        return Loss()

    def _prepare_pairs(self, tables: Mapping[str, Any], columns: PairColumns) -> PreparedData:
        _, tokenizer, recipe, length = self._parts
        texts = [columns.query, columns.positive, *columns.negatives]
        recipe = replace(recipe, prompts={**recipe.prompts, **self._read_prompts(texts)})
        parts = self._build_parts(tokenizer, length)._replace(recipe=recipe)
        return self.task.encode_tables(parts, tables, columns)

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
        settings = super().build_settings()
        return settings.replace("batch_sampler", mask_duplicates=self.args.masks_duplicates)
