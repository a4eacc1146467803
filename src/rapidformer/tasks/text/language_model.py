"""What both kinds of language model have in common: token records, their loss and perplexity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.tasks.base import PreparedData, Record, Task, get_mean_loss
from rapidformer.tasks.metrics.perplexity import compute_perplexity
from rapidformer.tasks.rows.columns import ColumnRole

if TYPE_CHECKING:
    import torch

    from rapidformer.tasks.metrics.tally import Tally

TEXT = ColumnRole(
    name="text",
    candidates=("text", "content", "sentence", "document", "article", "review", "code"),
    holds="the text",
    setting="text_column",
)


class LanguageModel(Task):
    """A task whose rows are blocks of plain text, not examples of the user's."""

    columns: tuple[ColumnRole, ...] = (TEXT,)

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        from rapidformer.tasks.metrics.tally import TokenTally

        return TokenTally()


def score_blocks(logits: torch.Tensor, labels: torch.Tensor) -> list[Record]:
    """One record per row: summed loss, labelled tokens, correct tokens."""
    from rapidformer.tasks.evaluation.scoring import score_tokens

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
