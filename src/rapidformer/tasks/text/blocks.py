"""Plain text for language models: rows of tokens, their records, loss and perplexity.

With `group_texts`, texts are joined and cut into rows of exactly the sequence length, so that
nothing is padded or truncated; what remains at the end of a batch of 1000 texts becomes a shorter
row instead of being dropped. Without it, each text is one row, truncated to the length.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError
from rapidformer.tasks.base import Answers, PreparedData, Record, Task, check_row_texts
from rapidformer.tasks.metrics.tally import Tally, TokenTally, compute_perplexity
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.text.text import TextParts

if TYPE_CHECKING:
    import torch

TEXT = ColumnRole(
    "text", "text_column", "the text",
    ("text", "content", "sentence", "document", "article", "review", "code"),
)  # fmt: skip


def encode_blocks(
    rows: Any, split: str, column: str, parts: TextParts, *, add_special: bool
) -> Any:
    """Token rows. ``add_special`` frames each row as the tokenizer does ([CLS] ... [SEP]);
    otherwise the end-of-text token, if there is one, follows each text.
    """
    tokenizer, groups = parts.tokenizer, parts.args.group_texts
    before, after = get_frame(tokenizer) if add_special else ([], [])
    room = parts.length - len(before) - len(after)
    end = [] if add_special or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        texts = check_row_texts(columns[column], column, split, indices[0])
        texts = [text for text in texts if text.strip()]
        ids = tokenize(texts, tokenizer) if texts else []
        if groups:
            joined = list(chain.from_iterable([*text, *end] for text in ids))
            pieces = [joined[start : start + room] for start in range(0, len(joined), room)]
        else:
            pieces = [[*text, *end][:room] for text in ids]
        framed = [[*before, *piece, *after] for piece in pieces if len(piece) > 1 or add_special]
        return {"input_ids": framed, "attention_mask": [[1] * len(row) for row in framed]}

    result = parts.map_rows(rows, encode, "blocks", column, groups, add_special)
    if len(result) == 0:
        raise DataError(f"{split}: the column {column} has no text to train on.")
    return result


def tokenize(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids without special tokens, at full length; says nothing about what is cut later."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(ids) for ids in encoded]


def get_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(probe) + 1):
        if framed[start : start + len(probe)] == probe:
            return framed[:start], framed[start + len(probe) :]
    return [], []


class LanguageModel(Task):
    """A task whose rows are blocks of plain text, not examples of the user's."""

    columns: tuple[ColumnRole, ...] = (TEXT,)

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return TokenTally()


def score_blocks(logits: torch.Tensor, labels: torch.Tensor) -> list[Record]:
    """One record per row: summed loss, labelled tokens, correct tokens."""
    from rapidformer.tasks.evaluation.scoring import score_tokens

    names = ("loss", "count", "hits")
    rows = zip(*score_tokens(logits, labels), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def describe_blocks(records: list[Record]) -> Answers:
    """The perplexity of each block, if there is nothing to generate or fill in."""
    counts = [record["count"] for record in records]
    losses = [r["loss"] / r["count"] if r["count"] else float("nan") for r in records]
    return [
        {"loss": loss, "perplexity": compute_perplexity(loss), "tokens": count}
        for loss, count in zip(losses, counts, strict=True)
    ]
