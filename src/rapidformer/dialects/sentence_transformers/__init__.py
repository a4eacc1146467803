"""sentence-transformers' names: its models, trainers, arguments and losses.

    from rapidformer.dialects.sentence_transformers import SentenceTransformer, losses
    from rapidformer.dialects.sentence_transformers import SentenceTransformerTrainer
    from rapidformer.dialects.sentence_transformers.cross_encoder import CrossEncoder, losses

In-batch negatives are those of the global batch. A model of sentence-transformers itself can be
trained as well: its own modules are.
"""

from rapidformer.dialects.sentence_transformers import losses
from rapidformer.dialects.sentence_transformers.arguments import (
    CrossEncoderTrainingArguments,
    SentenceTransformerTrainingArguments,
)
from rapidformer.dialects.sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
)
from rapidformer.dialects.sentence_transformers.model import SentenceTransformer
from rapidformer.dialects.sentence_transformers.trainer import SentenceTransformerTrainer

__all__ = [
    "CrossEncoder", "CrossEncoderTrainer", "CrossEncoderTrainingArguments",
    "SentenceTransformer", "SentenceTransformerTrainer", "SentenceTransformerTrainingArguments",
    "losses",
]  # fmt: skip
