"""Learn to score a document for a query: both are read together, as one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables
from rapidformer.tasks.embedding.columns import SCORE, Item, PairColumns, group_rows, hash_text
from rapidformer.tasks.embedding.embedding import (
    Features,
    PairTask,
    build_collator,
    check_item,
    encode_splits,
    load_pair_parts,
)
from rapidformer.tasks.metrics.retrieval import RANKING_METRICS, RerankingTally
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.rows import get_column, to_rows
from rapidformer.tasks.text.text import TextParts

if TYPE_CHECKING:
    from torch import nn

_LOSSES = ("bce", "mse", "margin_mse", "listwise", "listnet")
_OF_LISTS = ("listwise", "listnet")
_OF_SCORES = ("mse", "margin_mse")
"""They learn scores as they are, not from 0 to 1."""
_SIGMOID, _IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


class Reranking(PairTask):
    name = "reranking"
    description = "learn to score documents for a query, to sort what a search has found"
    notes = (
        "`--loss bce` learns each document's label (from 0 to 1), `mse` its score and `margin_mse` "
        "how much better than a negative the positive is; `listwise` and `listnet` learn which of "
        "a query's documents fits. RUN/best loads as `CrossEncoder(folder)`. See "
        "[Embeddings and rerankers](embeddings.md)."
    )
    auto_class = "AutoModelForSequenceClassification"
    streams = True
    metrics = ("loss", "accuracy", "spearmanr", *RANKING_METRICS)
    answer_keys = frozenset({"score", "scores"})

    needs_rows = "a query and a document"

    def load_parts(self, args: Settings) -> TextParts:
        return load_pair_parts(args)

    def encode_tables(self, parts: TextParts, tables: Tables, columns: PairColumns) -> PreparedData:
        from rapidformer.tasks.embedding.objective import RerankingObjective

        args = parts.args
        loss = _choose_loss(args, columns)

        def encode(items: list[Item]) -> Features:
            return encode_pairs([_label(item, loss) for item in items], parts)

        features = encode_splits(tables, columns, parts, encode, "reranking", loss, joins=True)
        has_lists = any(len(n) > 1 for f in features.values() for n in get_column(f, "text_ids"))
        extras = {"rows": tables, "loss": loss, "text_names": ("document {}",), "lists": has_lists}
        head = _describe_head(_IDENTITY if loss in _OF_SCORES else _SIGMOID)
        collate = build_collator(features, parts)
        prepared = parts.prepare(features, extras, head, collate=collate)
        return replace(prepared, objective=RerankingObjective(loss, args.positive_weight))

    def encode_input(
        self, parts: TextParts, table: list[Record], columns: PairColumns
    ) -> PreparedData:
        features = encode_pairs(columns.read_input(table), parts)
        activation = read_activation(parts.config)
        extras = {"rows": {"test": table}, "is_raw": activation == _IDENTITY}
        prepared = parts.prepare_input(features, extras)
        collate = build_collator({"test": features}, parts)
        return replace(prepared, collate=collate, model_settings=_describe_head(activation))

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.embedding.objective import score_documents

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
        objective: Any = prepared.objective
        losses, weights = objective.compare(logits, batch)
        scores = [row[:n] for row, n in zip(batch["scores"].tolist(), counts, strict=True)]
        if prepared.extras["loss"] == "margin_mse":  # the first document fits
            scores = [[float(place == 0) for place in range(n)] for n in counts]
        columns = {"loss": losses.tolist(), "count": weights.tolist(), "scores": scores}
        return [a | b for a, b in zip(records, to_rows(columns), strict=True)]

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return RerankingTally()

    def get_best_metric(self, prepared: PreparedData) -> tuple[str, bool]:
        is_ranked = prepared.extras["lists"] and prepared.extras["loss"] != "mse"
        return ("ndcg@10", True) if is_ranked else ("loss", False)

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        shown = _describe(record["logits"], is_raw=prepared.extras.get("is_raw", False))
        return dict(prepared.extras["rows"][split][number]) | shown


def _describe_head(activation: str) -> dict[str, Any]:
    """The model's settings, as CrossEncoder(folder) reads them: ``predict`` writes its scores."""
    return {"num_labels": 1, "sentence_transformers": {"activation_fn": activation}}


def read_activation(config: Any) -> str:
    """What turns a model's output into a score, by its Python name."""
    saved = getattr(config, "sentence_transformers", None) or {}
    # Versions before 4 wrote it under another name, which many published models have.
    old = getattr(config, "sbert_ce_default_activation_function", None)
    return str(saved.get("activation_fn") or old or _SIGMOID)


def _describe(logits: Any, *, is_raw: bool) -> dict[str, Any]:
    """A score for each document: from 0 to 1, unless the model has learnt others."""
    import numpy as np

    values = logits.astype(np.float64)
    scores = [round(float(score), 7) for score in (values if is_raw else 1 / (1 + np.exp(-values)))]
    return {"score": scores[0]} if len(scores) == 1 else {"scores": scores}


def _choose_loss(args: Settings, columns: PairColumns) -> str:
    loss = (args.loss or "bce").lower().replace("-", "_")
    if loss not in _LOSSES:
        raise ConfigurationError(f"--loss {args.loss}: --task reranking has {', '.join(_LOSSES)}.")
    if args.positive_weight <= 0:
        raise ConfigurationError(f"--positive-weight must be above 0, got {args.positive_weight}.")
    if loss == "margin_mse" and columns.score is None:
        raise DataError(f"--loss {loss} needs scores: name their column with {SCORE.flag}.")
    return loss


def _label(item: Item, loss: str) -> Item:
    """The item with a label for each document: 1 for those that fit, unless it has scores."""
    if loss == "margin_mse":
        return check_item(item, loss)
    count = len(item.documents)
    labels = item.scores or tuple(float(place < item.positives) for place in range(count))
    if len(labels) != count:
        raise DataError(f"{item.where} has {len(labels)} scores for {count} documents.")
    if loss not in (*_OF_SCORES, "listnet") and (min(labels) < 0 or max(labels) > 1):
        wrong = next(label for label in labels if not 0 <= label <= 1)
        raise DataError(f"{item.where} has the score {wrong:g}: it must be from 0 to 1.")
    if loss in _OF_LISTS and (count < 2 or (loss == "listwise" and max(labels) == 0)):
        what = "one document alone" if count < 2 else "no document that fits"
        raise DataError(
            f"{item.where} has {what}: --loss {loss} compares the documents of a row. Use --loss "
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
