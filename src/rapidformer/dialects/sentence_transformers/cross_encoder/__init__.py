"""sentence-transformers' rerankers: ``CrossEncoder``, its trainer, arguments and losses."""

from rapidformer.dialects.sentence_transformers.arguments import CrossEncoderTrainingArguments
from rapidformer.dialects.sentence_transformers.cross_encoder import losses
from rapidformer.dialects.sentence_transformers.cross_encoder.model import (
    CrossEncoder,
    CrossEncoderTrainer,
)

__all__ = ["CrossEncoder", "CrossEncoderTrainer", "CrossEncoderTrainingArguments", "losses"]
