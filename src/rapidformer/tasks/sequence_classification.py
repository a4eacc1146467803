"""Classify a text or a pair of texts, or predict a number for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.tasks.base import PreparedData, Record, Task, check_row_texts
from rapidformer.tasks.labels.labels import read_labels
from rapidformer.tasks.labels.space import (
    MULTI,
    REGRESSION,
    SINGLE,
    get_model_classes,
    get_output_names,
)
from rapidformer.tasks.metrics import classification, regression
from rapidformer.tasks.rows.columns import ColumnRole, check_given, describe_missing, find_column
from rapidformer.tasks.rows.rows import as_rows, get_column, get_column_names, get_splits
from rapidformer.tasks.text.text import (
    TextParts,
    load_text_parts,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rapidformer.tasks.labels.space import LabelSpace
    from rapidformer.tasks.metrics.tally import Tally

# Tried in this order. A pair comes before its first half alone.
PAIRS: tuple[tuple[str, str], ...] = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"),
    ("text1", "text2"), ("text_a", "text_b"), ("text", "text_pair"), ("text", "hypothesis"),
    ("sentence_a", "sentence_b"), ("sentence_A", "sentence_B"), ("query", "document"),
    ("query", "passage"), ("question", "sentence"), ("question", "passage"),
    ("question", "answer"), ("question", "context"),
)  # fmt: skip
TEXT = ColumnRole(
    name="text",
    candidates=(
        "sentence", "text", "sentence1", "question1", "premise", "content", "review", "comment",
        "tweet", "document", "question", "query", "utterance", "message", "headline", "title",
    ),
    holds="the text",
    setting="text_column",
)  # fmt: skip
TEXT_PAIR = ColumnRole(
    name="text_pair",
    candidates=tuple(dict.fromkeys(second for _, second in PAIRS)),
    holds="the second text of a pair",
    setting="text_pair_column",
    required=False,
)
LABEL = ColumnRole(
    name="label",
    candidates=(
        "label", "labels", "label_ids", "gold_label", "target", "class", "category", "score",
        "similarity_score", "sentiment", "intent", "stars", "rating", "coarse_label", "fine_label",
    ),
    holds="the label: a string, an integer from 0, a float (regression) or a list",
    setting="label_column",
)  # fmt: skip

_TEXTS = "text_columns"
"""Where a model's configuration keeps the columns that it was trained on."""


class SequenceClassification(Task):
    name = "sequence_classification"
    aliases = ("text_classification", "classification", "regression")
    description = "classify a text or a pair of texts, or predict a number for it"
    columns = (TEXT, TEXT_PAIR, LABEL)
    auto_class = "AutoModelForSequenceClassification"
    answer_keys = frozenset({"label", "labels", "score", "scores"})
    metrics = (
        "accuracy", "f1", "f1_macro", "matthews_correlation", "pearson", "spearmanr", "mse", "mae",
        "loss",
    )  # fmt: skip
    best_metric = "accuracy"
    greater_is_better = True

    def check_columns(
        self, rows: list[dict[str, Any]], args: Settings, *, has_answers: bool
    ) -> None:
        available = list(dict.fromkeys(name for row in rows for name in row))
        problems: list[str] = []
        label = None
        try:
            label = _find_label(available, args) if has_answers else None
        except DataError as error:
            problems.append(str(error))
        try:
            find_texts(available, args, taken=label)
        except DataError as error:
            if not problems or args.text_column or args.text_pair_column:
                problems.append(str(error))
        if problems:
            raise DataError(" ".join(problems))

    def prepare(self, args: Settings, splits: Mapping[str, Any] | None = None) -> PreparedData:
        parts = load_text_parts(args)
        tables = get_splits(args, splits)
        available = get_column_names(next(iter(tables.values())))
        label = _find_label(available, args)
        texts = find_texts(available, args, taken=label)
        space, labelled = read_labels(tables, label, args, get_model_classes(parts.config))
        features = {
            split: encode_texts(
                rows, split, texts, parts, (label, space) if labelled[split] else None
            )
            for split, rows in tables.items()
        }
        extras = {
            "rows": tables,
            "texts": texts,
            "names": space.names,
            "problem_type": space.problem_type,
            "labelled": labelled,
            "data_name": (args.data_name or "").lower().replace("-", ""),
        }
        settings = {**space.get_model_settings(), _TEXTS: [name for name in texts if name]}
        return parts.prepare(features, extras, settings=settings)

    def prepare_for_prediction(
        self, args: Settings, rows: Sequence[dict[str, Any] | str]
    ) -> PreparedData:

        parts = load_text_parts(args)
        table = as_rows(rows, args.text_column or "text")
        texts = find_texts(get_column_names(table), args)
        _check_has_pairs(texts, parts.config)
        extras = {
            "rows": {"test": table},
            "texts": texts,
            "names": get_output_names(parts.config),
            "problem_type": get_problem_type(parts.config),
        }
        return parts.prepare_input(encode_texts(table, "input", texts, parts, None), extras)

    def evaluate_step(
        self, model: nn.Module, batch: dict[str, torch.Tensor], prepared: PreparedData
    ) -> list[Record]:
        from rapidformer.tasks.evaluation.scoring import score_classes

        logits = model(**self.drop_labels(batch)).logits
        return score_classes(logits, batch.get("labels"), prepared.extras["problem_type"])

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        extras = prepared.extras
        return build_classifier_tally(
            extras["problem_type"], extras["names"], extras.get("data_name", "")
        )

    def get_best_metric(self, prepared: PreparedData) -> tuple[str, bool]:
        if prepared.extras.get("problem_type") == REGRESSION:
            return (
                ("pearson", True) if prepared.extras.get("data_name") == "stsb" else ("loss", False)
            )
        if prepared.extras.get("data_name") == "cola":
            return "matthews_correlation", True
        return "accuracy", True

    def predictions(
        self, records: list[Record], prepared: PreparedData, split: str
    ) -> list[dict[str, Any]]:

        columns = [name for name in prepared.extras["texts"] if name]
        rows = prepared.extras["rows"][split]
        texts = zip(*(get_column(rows, name) for name in columns), strict=True)
        kind, names = prepared.extras["problem_type"], prepared.extras["names"]
        return [
            dict(zip(columns, text, strict=True)) | describe_record(record, kind, names)
            for text, record in zip(texts, records, strict=True)
        ]


def _find_label(available: Sequence[str], args: Settings) -> str:
    """The label's column; if the text column is missing too, one error reports both."""
    try:
        return str(find_column(LABEL, available, args))
    except DataError:
        if args.label_column is None and args.text_column is None and not _has_text(available):
            raise DataError(describe_missing([TEXT, LABEL], available)) from None
        raise


def _has_text(available: Sequence[str]) -> bool:
    return any(name in available for name in TEXT.candidates)


def find_texts(
    available: Sequence[str], args: Settings, taken: str | None = None
) -> tuple[str, str | None]:
    """The column of the text and, for pairs, of the second one."""
    if args.text_column is not None:
        first = check_given(args.text_column, TEXT.flag, available)
        second = args.text_pair_column
        return first, check_given(second, TEXT_PAIR.flag, available) if second else None
    if args.text_pair_column is not None:
        second = check_given(args.text_pair_column, TEXT_PAIR.flag, available)
        return str(find_column(TEXT, available, args, taken=(second, taken))), second
    for pair in PAIRS:
        if pair[0] in available and pair[1] in available and taken not in pair:
            return pair
    return str(find_column(TEXT, available, args, taken=(taken,))), None


def _check_has_pairs(texts: tuple[str, str | None], config: Any) -> None:
    """Refuse single texts for a model that was trained on pairs: its answers would mean nothing."""
    trained_on = getattr(config, _TEXTS, None) or ()
    if len(trained_on) > 1 and texts[1] is None:
        raise DataError(
            f"the model was trained on pairs of texts ({' and '.join(trained_on)}), and the input "
            f"has only one ({texts[0]}): give rows with both texts. --text-column and "
            "--text-pair-column name their columns."
        )


def encode_texts(
    rows: Any,
    split: str,
    texts: tuple[str, str | None],
    parts: TextParts,
    labels: tuple[str, LabelSpace] | None,
) -> Any:
    """The token ids of every row, and its label."""

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        values = [check_row_texts(columns[name], name, split, indices[0]) for name in texts if name]
        result = dict(parts.tokenizer(*values, truncation=True, max_length=parts.length))
        if labels is not None:
            column, space = labels
            result["labels"] = [space.encode(value) for value in columns[column]]
        return result

    for name in texts:
        _check_column(rows, name, split)
    return parts.map_rows(rows, encode, "texts", texts, labels)


def _check_column(rows: Any, name: str | None, split: str) -> None:
    names = get_column_names(rows)
    if name is not None and name not in names:
        raise DataError(
            f"{split} has no column {name}, only {', '.join(names)}: all splits need the same "
            "columns."
        )


def get_problem_type(config: Any) -> str:
    """What a saved classifier was trained for; older models do not record it."""
    if config.problem_type is not None:
        return str(config.problem_type)
    return REGRESSION if config.num_labels == 1 else SINGLE


def build_classifier_tally(problem_type: str, names: Sequence[str], data_name: str = "") -> Tally:
    """The running metrics of a classifier, or of a model that predicts a number."""
    if problem_type == REGRESSION:
        return regression.RegressionTally()
    if problem_type == MULTI:
        return classification.MultiLabelTally(names)
    wanted = classification.GLUE_METRICS.get(data_name, classification.DEFAULT_METRICS)
    return classification.ClassTally(names, wanted)


def describe_record(record: Record, problem_type: str, names: Sequence[str]) -> dict[str, Any]:
    """A classifier's record as the user sees it: label, score, all scores, the true label."""
    import numpy as np

    logits = np.asarray(record["logits"], dtype=np.float64)
    truth = record.get("label")
    if problem_type == REGRESSION:
        shown: dict[str, Any] = {"score": round(float(logits[0]), 6)}
        return shown | ({"expected": truth} if truth is not None else {})
    if problem_type == MULTI:
        scores = 1 / (1 + np.exp(-logits))
        shown = {"labels": [name for name, score in zip(names, scores, strict=True) if score > 0.5]}
        expected: Any = truth and [n for n, on in zip(names, truth, strict=True) if on >= 0.5]
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        best = int(scores.argmax())
        shown = {"label": names[best], "score": round(float(scores[best]), 6)}
        expected = names[truth] if truth is not None else None
    shown["scores"] = {n: round(float(s), 6) for n, s in zip(names, scores, strict=True)}
    return shown | ({"expected": expected} if truth is not None else {})
