"""What both kinds of language model have in common: token records, their loss and perplexity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.tasks.base import PreparedData, Record, Task, get_mean_loss
from rapidformer.tasks.columns import ColumnRole
from rapidformer.tasks.metrics.perplexity import compute_perplexity

if TYPE_CHECKING:
    import torch

TEXT = ColumnRole(
    name="text",
    candidates=("text", "content", "sentence", "document", "article", "review", "code"),
    holds="the text",
    setting="text_column",
)


class LanguageModel(Task):
    """A task whose rows are blocks of plain text, not examples of the user's."""

    columns: tuple[ColumnRole, ...] = (TEXT,)

    def score(self, records: list[Record], prepared: PreparedData, split: str) -> dict[str, float]:
        count = sum(record["count"] for record in records)
        hits = sum(record["hits"] for record in records)
        return {
            "perplexity": compute_perplexity(get_mean_loss(records)),
            "accuracy": hits / count if count else 0.0,
        }


def score_blocks(logits: torch.Tensor, labels: torch.Tensor) -> list[Record]:
    """One record per row: summed loss, labelled tokens, correct tokens."""
    from rapidformer.tasks.scoring import score_tokens

    losses, counts, hits = score_tokens(logits, labels)
    return [
        {"loss": loss, "count": count, "hits": hit}
        for loss, count, hit in zip(losses, counts, hits, strict=True)
    ]


def describe_blocks(records: list[Record]) -> list[dict[str, Any]]:
    """The perplexity of each block, if there is nothing to generate or fill in."""
    return [
        {
            "loss": get_mean_loss([record]),
            "perplexity": compute_perplexity(get_mean_loss([record])),
            "tokens": record["count"],
        }
        for record in records
    ]
