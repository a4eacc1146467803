"""sentence-transformers' names: its model, trainer, arguments and losses.

    from rapidformer.dialects.sentence_transformers import SentenceTransformer, losses
    from rapidformer.dialects.sentence_transformers import SentenceTransformerTrainer

In-batch negatives are those of the global batch. A model of sentence-transformers itself can be
trained as well: its own modules are.
"""

from rapidformer.dialects.sentence_transformers import losses
from rapidformer.dialects.sentence_transformers.arguments import (
    SentenceTransformerTrainingArguments,
)
from rapidformer.dialects.sentence_transformers.model import SentenceTransformer
from rapidformer.dialects.sentence_transformers.trainer import SentenceTransformerTrainer

__all__ = [
    "SentenceTransformer", "SentenceTransformerTrainer", "SentenceTransformerTrainingArguments",
    "losses",
]  # fmt: skip
