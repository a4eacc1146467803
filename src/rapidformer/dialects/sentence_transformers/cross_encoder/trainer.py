"""``CrossEncoderTrainer`` on Hugging Face's ``Trainer``: what it learns is the task's."""

from __future__ import annotations

from typing import Any

from rapidformer.dialects.sentence_transformers.arguments import CrossEncoderTrainingArguments
from rapidformer.dialects.sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from rapidformer.dialects.sentence_transformers.cross_encoder.model import take_parts
from rapidformer.dialects.sentence_transformers.losses import Loss
from rapidformer.dialects.sentence_transformers.trainer import PairTrainer
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.embedding.columns import PairColumns
from rapidformer.tasks.embedding.reranking import Reranking


class CrossEncoderTrainer(PairTrainer):
    """Trains a CrossEncoder on pairs of texts: columns count by their order, as in its own."""

    room = "rapidformer.dialects.sentence_transformers.cross_encoder"
    arguments_class = CrossEncoderTrainingArguments
    task: Reranking

    def _take(self, model: Any) -> Any:
        self.task, self._parts = Reranking(), take_parts(model)
        return self._parts.transformer

    def _choose_loss(self) -> Loss:
        return BinaryCrossEntropyLoss()

    def _prepare_pairs(self, tables: Any, columns: PairColumns) -> PreparedData:
        _, tokenizer, length = self._parts
        tokenizer.model_max_length = length  # as it is saved, it cuts where training did
        return self.task.encode_tables(self._build_parts(tokenizer, length), tables, columns)
