"""Learn to score a document for a query: both are read together, as one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.base import Answers, Batch, PreparedData, Record, Row
from rapidformer.tasks.embedding.columns import Item, find_pair_columns, group_rows, hash_text
from rapidformer.tasks.embedding.embedding import (
    Features,
    PairTask,
    build_collator,
    encode_splits,
    load_pair_parts,
)
from rapidformer.tasks.metrics.retrieval import RANKING_METRICS, RerankingTally
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.rows import (
    as_full_rows,
    get_column,
    get_first_table,
    get_splits,
    to_rows,
)
from rapidformer.tasks.text.text import TextParts

if TYPE_CHECKING:
    from torch import nn

_LOSSES = ("bce", "listwise")
# What CrossEncoder(folder) reads; ``predict`` writes the same scores.
_SIGMOID = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}


class Reranking(PairTask):
    name = "reranking"
    description = "learn to score documents for a query, to sort what a search has found"
    notes = (
        "`--loss bce` learns each document's label (from 0 to 1); `--loss listwise` which of a "
        "query's documents fits. RUN/best loads as `CrossEncoder(folder)`. See "
        "[Embeddings and rerankers](embeddings.md)."
    )
    auto_class = "AutoModelForSequenceClassification"
    streams = True
    metrics = ("loss", "accuracy", "spearmanr", *RANKING_METRICS)
    answer_keys = frozenset({"score", "scores"})

    def prepare(self, args: Settings, splits: Mapping[str, Any] | None = None) -> PreparedData:
        from rapidformer.tasks.embedding.objective import RerankingObjective

        parts = load_pair_parts(args)
        tables = get_splits(args, splits)
        columns = find_pair_columns(get_first_table(tables), args)
        loss = (args.loss or "bce").lower()
        if loss not in _LOSSES:
            raise ConfigurationError(
                f"--loss {args.loss}: --task reranking has {', '.join(_LOSSES)}."
            )

        def encode(items: list[Item]) -> Features:
            return encode_pairs([_label(item, loss) for item in items], parts)

        features = encode_splits(tables, columns, parts, encode, "reranking", loss, joins=True)
        has_lists = any(len(s) > 1 for f in features.values() for s in get_column(f, "scores"))
        extras = {"rows": tables, "loss": loss, "text_names": ("document {}",), "lists": has_lists}
        prepared = parts.prepare(
            features, extras, {"num_labels": 1, **_SIGMOID}, collate=build_collator(features, parts)
        )
        return replace(prepared, objective=RerankingObjective(loss))

    def prepare_for_prediction(self, args: Settings, rows: Sequence[Row]) -> PreparedData:
        parts = load_pair_parts(args)
        table = as_full_rows(rows, "reranking needs a query and a document")
        columns = find_pair_columns(table, args, has_answers=False)
        values = {name: get_column(table, name) for name in columns.get_names()}
        items = columns.read(values, range(len(table)), "input", joins=True)
        features = encode_pairs(items, parts)
        prepared = parts.prepare_input(features, {"rows": {"test": table}})
        collate = build_collator({"test": features}, parts)
        return replace(prepared, collate=collate, model_settings={"num_labels": 1, **_SIGMOID})

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.embedding.objective import compute_ranking_losses, score_documents

        logits = score_documents(model, batch)
        counts = (batch["slots"] >= 0).sum(1).tolist()
        records: list[Record] = [
            {"logits": row[:count], "ids": ids}
            for row, count, ids in zip(
                logits.cpu().numpy(), counts, batch["text_ids"].tolist(), strict=True
            )
        ]
        if "loss" not in prepared.extras:
            return records
        losses, weights = compute_ranking_losses(logits, batch, prepared.extras["loss"])
        columns = {
            "loss": losses.tolist(), "count": weights.tolist(),
            "scores": [row[:n] for row, n in zip(batch["scores"].tolist(), counts, strict=True)],
        }  # fmt: skip
        return [a | b for a, b in zip(records, to_rows(columns), strict=True)]

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return RerankingTally()

    def get_best_metric(self, prepared: PreparedData) -> tuple[str, bool]:
        return ("ndcg@10", True) if prepared.extras["lists"] else ("loss", False)

    def predictions(self, records: list[Record], prepared: PreparedData, split: str) -> Answers:
        rows = prepared.extras["rows"][split]
        return [dict(row) | _describe(r["logits"]) for row, r in zip(rows, records, strict=True)]


def _describe(logits: Any) -> dict[str, Any]:
    """A score from 0 to 1 for each document."""
    import numpy as np

    scores = [round(float(score), 7) for score in 1 / (1 + np.exp(-logits.astype(np.float64)))]
    return {"score": scores[0]} if len(scores) == 1 else {"scores": scores}


def _label(item: Item, loss: str) -> Item:
    """The item with a label for each document: 1 for those that fit, unless it has scores."""
    count = len(item.documents)
    labels = item.scores or tuple(float(place < item.positives) for place in range(count))
    if len(labels) != count:
        raise DataError(f"{item.where} has {len(labels)} scores for {count} documents.")
    if min(labels) < 0 or max(labels) > 1:
        wrong = next(label for label in labels if not 0 <= label <= 1)
        raise DataError(f"{item.where} has the score {wrong:g}: it must be from 0 to 1.")
    if loss == "listwise" and (count < 2 or max(labels) == 0):
        what = "one document alone" if count < 2 else "no document that fits"
        raise DataError(
            f"{item.where} has {what}: --loss listwise compares the documents of a row. Use --loss "
            "bce for single pairs."
        )
    return replace(item, scores=labels)


def encode_pairs(items: Sequence[Item], parts: TextParts) -> Features:
    """The features of items: a sequence for each document, which begins with the query."""
    queries = [item.query for item in items for _ in item.documents]
    documents = [text for item in items for text in item.documents]
    encoded = parts.tokenizer(queries, documents, truncation=True, max_length=parts.length)
    columns = {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}
    columns["text_ids"] = [hash_text(query) for query in queries]
    return group_rows(items, [len(item.documents) for item in items], columns)
