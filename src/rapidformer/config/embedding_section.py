"""The settings of embeddings and rerankers (see ``task_sections.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

_TASKS = {"tasks": ("embedding",)}


@dataclass(kw_only=True, frozen=True)
class EmbeddingArguments:
    """Embeddings and rerankers"""

    negatives: Literal["global-batch", "micro-batch"] = field(
        default="global-batch", metadata=_TASKS
    )
    """whose documents infonce and cosent compare a row with: those of all rows of the update, or
    only of its own micro-batch"""
    similarity_scale: float = field(default=20.0, metadata=_TASKS)
    """factor of the cosines in infonce and cosent: 1 / temperature"""
    symmetric: bool = field(default=False, metadata=_TASKS)
    """infonce: also find the query of each document, and take the mean of both"""
    mask_duplicates: bool = field(default=True, metadata=_TASKS)
    """infonce: a text is no negative of a row whose positive is the same text, or of an equal
    query"""
    triplet_margin: float = field(default=5.0, metadata=_TASKS)
    """triplet: how much farther away a negative must be than the positive"""
    matryoshka_dims: list[int] | None = field(default=None, metadata=_TASKS)
    """also learn the first N numbers of a vector, for each of these N: the losses are added"""
    pooling: Literal["mean", "first", "last"] | None = field(default=None, metadata=_TASKS)
    """which tokens' states become the vector (default: the model's own, or mean)"""
    normalize_embeddings: bool | None = field(default=None, metadata=_TASKS)
    """scale vectors to length 1 (default: the model's own; otherwise yes, but not for triplet and
    margin_mse, which learn from lengths)"""
    query_prompt: str | None = field(default=None, metadata=_TASKS)
    """text to put before every query, such as "query: " (default: the model's own)"""
    document_prompt: str | None = field(default=None, metadata=_TASKS)
    """text to put before every document, such as "passage: " (default: the model's own)"""
    pool_prompt: bool | None = field(default=None, metadata=_TASKS)
    """count the prompt's tokens in the vector (default: the model's own, or yes)"""
    negative_columns: list[str] | None = None
    """columns with hard negatives, or one with lists of them (default: found by name)"""
