"""Learn vectors of texts: those of a query and of a text that fits it are close."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables, Task
from rapidformer.tasks.embedding.columns import (
    NEGATIVE,
    POSITIVE,
    QUERY,
    SCORE,
    Item,
    PairColumns,
    find_pair_columns,
    group_rows,
    hash_text,
)
from rapidformer.tasks.embedding.files import DOCUMENT, Recipe, SentenceFiles, read_recipe
from rapidformer.tasks.embedding.files import QUERY as QUERY_PROMPT
from rapidformer.tasks.metrics.retrieval import RANKING_METRICS, EmbeddingTally
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole, as_optional, find_column
from rapidformer.tasks.rows.rows import get_column, get_column_names, has_columns, is_row_stream
from rapidformer.tasks.text.text import TextParts, get_context_length, load_text_parts

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.tasks.embedding.objective import ItemCollator, LossSettings

_LOSSES = ("infonce", "cosent", "cosine", "triplet", "margin_mse")
_OF_PAIRS = ("cosent", "cosine")
_NEEDS_SCORES = (*_OF_PAIRS, "margin_mse")
_NEEDS_NEGATIVES = ("triplet", "margin_mse")
"""They also learn from the vectors' lengths."""
Features = list[dict[str, Any]]
_TEXT = ColumnRole("text", "text_column", "the text", ("text", "sentence", "content"))
_EVALUATED = 64
"""Rows that are each other's negatives in the loss of an evaluation."""


class PairTask(Task):
    """A task whose rows are a query and documents."""

    columns = (QUERY, POSITIVE, NEGATIVE, SCORE)
    greater_is_better = True

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> PairColumns | None:
        return find_pair_columns(rows, args, has_answers=has_answers)


class Embedding(PairTask):
    name = "embedding"
    description = "learn vectors of texts, for search and similarity"
    notes = (
        "The negatives of a row are the documents of the whole global batch, whatever the "
        "micro-batch and the number of ranks. RUN/best loads as `SentenceTransformer(folder)`. "
        "See [Embeddings and rerankers](embeddings.md)."
    )
    auto_class = "AutoModel"
    best_metric = "ndcg@10"
    streams = True
    metrics = ("loss", "pearson", "spearmanr", "triplet_accuracy", *RANKING_METRICS)
    answer_keys = frozenset({"embedding", "similarity"})

    def load_parts(self, args: Settings) -> TextParts:
        from rapidformer.models.adapter_folder import find_files
        from rapidformer.models.location import get_model_location

        location = find_files(get_model_location(args), "modules.json")
        saved = read_recipe(location, args.pooling, args.cache_dir)
        return load_pair_parts(args, saved.length)._replace(recipe=saved)

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> PairColumns | None:
        return super().choose_columns(rows, args, has_answers=True) if has_answers else None

    def encode_tables(self, parts: TextParts, tables: Tables, columns: PairColumns) -> PreparedData:
        loss = _choose_loss(columns, parts)
        recipe = _choose_recipe(parts, loss.name)
        columns = replace(
            columns, score=columns.score if loss.name in _NEEDS_SCORES else None,
            negatives=() if loss.name in _OF_PAIRS else columns.negatives,
        )  # fmt: skip

        def encode(items: list[Item]) -> Features:
            return encode_items([check_item(item, loss.name) for item in items], parts, recipe)

        features = encode_splits(tables, columns, parts, encode, "embedding", recipe, loss.name)
        extras = {"rows": tables, "loss": loss, "text_names": ("query", "positive", "negative {}")}
        collate = build_collator(features, parts)
        train: Any = features.get("train")
        if is_row_stream(train):
            features["train"] = train.map(collate.check)
        prepared = parts.prepare(features, extras, collate=collate)
        return _add_recipe(prepared, parts, recipe, loss)

    def encode_input(self, parts: TextParts, table: list[Record], columns: None) -> PreparedData:
        from rapidformer.tasks.embedding.objective import LossSettings

        recipe = _choose_recipe(parts, "infonce")
        items, prompt = _read_input(table, parts.args)
        features = encode_items(items, parts, recipe, prompt)
        prepared = parts.prepare_input(features, {"rows": {"test": table}})
        prepared = replace(prepared, collate=build_collator({"test": features}, parts))
        return _add_recipe(prepared, parts, recipe, LossSettings(name="infonce"))

    def build_model(
        self, args: Settings, prepared: PreparedData, *, must_be_trained: bool = False
    ) -> nn.Module:
        """Any encoder has vectors, also one that was never trained for them."""
        return super().build_model(args, prepared)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        objective: Any = prepared.objective
        items = objective.embed(model, batch)
        vectors, counts = items.vectors.cpu().numpy(), items.is_present.sum(1).tolist()
        ids = items.text_ids.tolist()
        scores: list[list[float]] = [[]] * len(counts)
        if items.scores is not None:
            scores = [[x for x in row if not math.isnan(x)] for row in items.scores.tolist()]
        rows = zip(vectors, ids, scores, counts, strict=True)
        return [
            {"vectors": vector[:count], "ids": names[:count], "scores": numbers}
            for vector, names, numbers, count in rows
        ]

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        loss = prepared.extras["loss"]
        return EmbeddingTally(lambda records: _compute_loss(records, loss), _EVALUATED)

    def get_best_metric(self, prepared: PreparedData) -> tuple[str, bool]:
        is_scored = prepared.extras["loss"].name in _OF_PAIRS
        return ("spearmanr" if is_scored else "ndcg@10"), True

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        return dict(prepared.extras["rows"][split][number]) | _describe(record["vectors"])


def _describe(vectors: Any) -> dict[str, Any]:
    """A vector, or the cosines of a query and its documents."""
    import numpy as np

    if len(vectors) == 1:
        return {"embedding": [float(f"{number:.9g}") for number in vectors[0]]}
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = [round(float(number), 6) for number in units[1:] @ units[0]]
    return {"similarity": cosines[0] if len(cosines) == 1 else cosines}


def load_pair_parts(args: Settings, length: int | None = None) -> TextParts:
    """``length`` is the model's own, if it says one: --seq-length comes first."""
    parts = load_text_parts(args)
    if parts.config.is_encoder_decoder:
        raise ModelError(
            f"--task {args.task} needs an encoder or a decoder, and {parts.config.model_type} is "
            "both: choose a model such as BERT, ModernBERT or Qwen3."
        )
    if args.seq_length is None and length is not None:
        length = min(length, get_context_length(parts.tokenizer, parts.config))
        parts = parts._replace(length=length)
    parts.tokenizer.model_max_length = parts.length  # as it is saved, it cuts where training did
    return parts


def build_collator(features: Mapping[str, Any], parts: TextParts) -> ItemCollator:
    """For items with as many texts and scores as any of these has."""
    from rapidformer.tasks.embedding.objective import ItemCollator
    from rapidformer.tasks.text.text import build_text_collator

    pads = build_text_collator(parts.tokenizer).pad_values
    texts, scores = (
        max(max(map(len, get_column(rows, name)), default=0) for rows in features.values())
        for name in ("text_ids", "scores")
    )
    return ItemCollator(pads, parts.tokenizer.padding_side, texts=texts, scores=scores)


def encode_splits(
    tables: Mapping[str, Any], columns: PairColumns, parts: TextParts,
    encode: Callable[[list[Item]], Features], *key: Any, joins: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The features of all splits; ``key`` is what they depend on besides columns and tokenizer."""

    def encode_split(split: str, rows: Any) -> Any:
        def encode_batch(values: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
            features = encode(columns.read(values, indices, split, joins=joins))
            return {name: [feature[name] for feature in features] for name in features[0]}

        has_columns(rows, split, columns.get_names(), may_lack=())
        return parts.map_rows(rows, encode_batch, columns, *key)

    return {split: encode_split(split, rows) for split, rows in tables.items()}


def _choose_loss(columns: PairColumns, parts: TextParts) -> LossSettings:
    """What was asked for, or what the columns are for; errors say what the data lacks."""
    from rapidformer.models.configuration import get_size
    from rapidformer.tasks.embedding.objective import LossSettings

    args = parts.args
    default = "infonce"
    if columns.score is not None:
        default = "margin_mse" if columns.negatives else "cosent"
    name = (args.loss or default).lower().replace("-", "_")
    if name not in _LOSSES:
        raise ConfigurationError(f"--loss {args.loss}: --task embedding has {', '.join(_LOSSES)}.")
    if name in _NEEDS_SCORES and columns.score is None:
        raise DataError(f"--loss {name} needs scores: name their column with {SCORE.flag}.")
    if name in _NEEDS_NEGATIVES and not columns.negatives:
        raise DataError(f"--loss {name} needs negatives: name their columns with {NEGATIVE.flag}.")
    width = get_size(parts.config, "hidden_size")
    too_large = [dim for dim in args.matryoshka_dims or () if not 0 < dim <= width]
    if too_large:
        raise ConfigurationError(
            f"--matryoshka-dims {too_large[0]}: the model's vectors have {width} numbers."
        )
    return LossSettings(
        name=name, scale=args.similarity_scale, is_symmetric=args.symmetric,
        masks_duplicates=args.mask_duplicates, margin=args.triplet_margin,
        dims=tuple(args.matryoshka_dims or ()),
    )  # fmt: skip


def _choose_recipe(parts: TextParts, loss: str) -> Recipe:
    """What was asked for, what the model brings, or the defaults."""
    args, saved = parts.args, parts.recipe
    normalizes = saved.normalizes
    if args.normalize_embeddings is not None:
        normalizes = args.normalize_embeddings
    given = {QUERY_PROMPT: args.query_prompt, DOCUMENT: args.document_prompt}
    return Recipe(
        pooling=args.pooling or saved.pooling,
        normalizes=loss not in _NEEDS_NEGATIVES if normalizes is None else normalizes,
        pools_prompt=saved.pools_prompt if args.pool_prompt is None else args.pool_prompt,
        prompts=saved.prompts | {name: text for name, text in given.items() if text is not None},
        length=parts.length,
    )


def _add_recipe(
    prepared: PreparedData, parts: TextParts, recipe: Recipe, loss: LossSettings
) -> PreparedData:
    """The data with its objective, and with what is saved next to the model."""
    from rapidformer.models.configuration import get_size
    from rapidformer.tasks.embedding.objective import EmbeddingObjective

    width = int(get_size(parts.config, "hidden_size"))
    objective = EmbeddingObjective(
        loss, recipe.pooling, normalizes=bool(recipe.normalizes),
        looks_at_update=parts.args.negatives == "global-batch",
    )  # fmt: skip
    files = SentenceFiles(parts.tokenizer, recipe, width)
    return replace(prepared, objective=objective, saved=files)


def check_item(item: Item, loss: str) -> Item:
    """The item, if the loss can be computed; with margins, if it learns those."""
    documents, scores = len(item.documents), len(item.scores)
    if loss in _NEEDS_NEGATIVES and documents < 2:
        raise DataError(f"{item.where} has no negative, which --loss {loss} needs.")
    if loss in _OF_PAIRS and scores != 1:
        raise DataError(f"{item.where} has {scores} scores: --loss {loss} needs one for each pair.")
    if loss == "cosine" and not -1 <= item.scores[0] <= 1:
        raise DataError(
            f"{item.where} has the score {item.scores[0]:g}, and a cosine is from -1 to 1: scale "
            "the scores, or use --loss cosent, which learns their order."
        )
    if loss == "margin_mse" and scores == 1 < documents - 1:
        raise DataError(
            f"{item.where} has one score for {documents - 1} negatives: give a list with one for "
            "each negative, or for each document."
        )
    if loss == "margin_mse" and scores == documents:
        return replace(item, scores=tuple(item.scores[0] - score for score in item.scores[1:]))
    return item


def encode_items(
    items: Sequence[Item], parts: TextParts, recipe: Recipe, prompt: str = QUERY_PROMPT
) -> Features:
    """The features of items; ``prompt`` is that of their first texts."""
    tokenizer = parts.tokenizer
    before = [recipe.prompts.get(name, "") for name in (prompt, DOCUMENT)]
    groups = [[item.query, *item.documents] for item in items]
    texts = [(place > 0, text) for group in groups for place, text in enumerate(group)]
    prompted = [before[is_document] + text for is_document, text in texts]
    columns: dict[str, list[Any]] = {
        "input_ids": tokenizer(prompted, truncation=True, max_length=parts.length)["input_ids"],
        "text_ids": [hash_text(text) for _, text in texts],
    }
    if any(before) and not recipe.pools_prompt:
        lengths = [count_prompt(text, tokenizer) for text in before]
        columns["prompts"] = [lengths[is_document] for is_document, _ in texts]
    return group_rows(items, map(len, groups), columns)


def count_prompt(prompt: str, tokenizer: Any) -> int:
    """The tokens before the text itself."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    return len(ids) - len({*ids[-1:]} & {*tokenizer.all_special_ids})


def _read_input(table: list[dict[str, Any]], args: Settings) -> tuple[list[Item], str]:
    """Texts to predict on, and whose prompt the first one of each row gets."""
    available = get_column_names(table)
    pair = [find_column(as_optional(role), available, args) for role in (QUERY, POSITIVE)]
    if all(pair):
        columns = find_pair_columns(table, args, has_answers=False)
        return columns.read_input(table), QUERY_PROMPT
    name = next(filter(None, pair), None) or str(find_column(_TEXT, available, args))
    prompt = QUERY_PROMPT if pair[0] else DOCUMENT if pair[1] else ""
    items = []
    for number, value in enumerate(get_column(table, name), start=1):
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"input, row {number}: the column {name} has no text.")
        items.append(Item(f"input, row {number}", value))
    return items, prompt


def _compute_loss(records: Sequence[Mapping[str, Any]], loss: LossSettings) -> tuple[float, float]:
    """The loss of a batch of records, as a sum with its count."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from rapidformer.tasks.embedding.objective import Items, compute_losses

    def join(name: str, value: float = 0.0) -> torch.Tensor:
        rows = [torch.as_tensor(record[name]) for record in records]
        return pad_sequence(rows, batch_first=True, padding_value=value)

    counts = torch.tensor([len(record["ids"]) for record in records])
    vectors = join("vectors")
    is_present = torch.arange(vectors.shape[1]) < counts[:, None]
    scores = join("scores", float("nan")) if records[0]["scores"] else None
    losses, weights = compute_losses(Items(vectors, is_present, join("ids"), scores), loss)
    return float(losses.sum()), float(weights.sum())
