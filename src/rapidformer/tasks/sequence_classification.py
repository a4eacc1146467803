"""Classify a text or a pair of texts, or predict a number for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.tasks.base import (
    Batch,
    PreparedData,
    Record,
    Records,
    Tables,
    Task,
    check_row_texts,
)
from rapidformer.tasks.labels.labels import (
    MULTI,
    REGRESSION,
    SINGLE,
    LabelSpace,
    get_model_classes,
    get_output_names,
    read_labels,
)
from rapidformer.tasks.metrics.classification import (
    DEFAULT_METRICS,
    GLUE_METRICS,
    ClassTally,
    MultiLabelTally,
    RegressionTally,
)
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole, check_given, describe_missing, find_column
from rapidformer.tasks.rows.rows import get_column_names, has_columns
from rapidformer.tasks.text.text import TextParts, TextTask

if TYPE_CHECKING:
    from torch import nn

# Tried in this order. A pair comes before its first half alone.
PAIRS: tuple[tuple[str, str], ...] = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"),
    ("text1", "text2"), ("text_a", "text_b"), ("text", "text_pair"), ("text", "hypothesis"),
    ("sentence_a", "sentence_b"), ("sentence_A", "sentence_B"), ("query", "document"),
    ("query", "passage"), ("question", "sentence"), ("question", "passage"),
    ("question", "answer"), ("question", "context"),
)  # fmt: skip
TEXT = ColumnRole("text", "text_column", "the text", (
    "sentence", "text", "sentence1", "question1", "premise", "content", "review", "comment",
    "tweet", "document", "question", "query", "utterance", "message", "headline", "title",
))  # fmt: skip
TEXT_PAIR = ColumnRole(
    "text_pair", "text_pair_column", "the second text of a pair",
    tuple(dict.fromkeys(second for _, second in PAIRS)), required=False,
)  # fmt: skip
LABEL = ColumnRole(
    "label", "label_column",
    "the label: a string, an integer from 0, a float (regression) or a list",
    ("label", "labels", "label_ids", "gold_label", "target", "class", "category", "score",
     "similarity_score", "sentiment", "intent", "stars", "rating", "coarse_label", "fine_label"),
)  # fmt: skip

_TEXTS = "text_columns"
"""Where a model's configuration keeps the columns that it was trained on."""


class Classifier(Task):
    """A task whose model gives each row a label, several labels or a number."""

    answer_keys = frozenset({"label", "labels", "score", "scores"})
    streams = True
    best_metric = "accuracy"
    greater_is_better = True
    learns_classes = True

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> Records:
        from rapidformer.accel.unpad.promises import reading_no_padding
        from rapidformer.tasks.evaluation.scoring import score_classes

        # One answer per row: nobody reads what the model returns for padding.
        with reading_no_padding():
            logits = model(**self.drop_labels(batch)).logits
        return score_classes(logits, batch.get("labels"), prepared.extras["problem_type"])

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        kind, names = prepared.extras["problem_type"], prepared.extras["names"]
        if kind == REGRESSION:
            return RegressionTally()
        if kind == MULTI:
            return MultiLabelTally(names)
        data_name = prepared.extras.get("data_name", "")
        return ClassTally(names, GLUE_METRICS.get(data_name, DEFAULT_METRICS))

    def describe(self, record: Record, prepared: PreparedData) -> dict[str, Any]:
        """A record as the user sees it: label, score, all scores, the true label."""
        return describe_record(record, prepared.extras["problem_type"], prepared.extras["names"])


class FileClassifier(Classifier):
    """A classifier of files: its first column holds them, and predictions name them."""

    metrics: tuple[str, ...] = ("accuracy", "f1", "f1_macro", "loss")

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        rows: Any = prepared.get_split(split)
        return {self.columns[0].name: rows.get_name(number)} | self.describe(record, prepared)


class SequenceClassification(TextTask, Classifier):
    name = "sequence_classification"
    description = "classify a text or a pair of texts, or predict a number for it"
    columns = (TEXT, TEXT_PAIR, LABEL)
    auto_class = "AutoModelForSequenceClassification"
    metrics = (
        "accuracy", "f1", "f1_macro", "matthews_correlation", "pearson", "spearmanr", "mse", "mae",
        "loss",
    )  # fmt: skip

    def choose_columns(
        self, rows: Any, args: Settings, *, has_answers: bool
    ) -> tuple[tuple[str, ...], str | None]:
        """Those of the texts, and that of the label."""
        available = get_column_names(rows)
        problems: list[str] = []
        label: str | None = None
        texts: tuple[str, ...] = ()
        try:
            label = _find_label(available, args) if has_answers else None
        except DataError as error:
            problems.append(str(error))
        try:
            texts = _find_texts(available, args, taken=label)
        except DataError as error:
            if not problems or args.text_column or args.text_pair_column:
                problems.append(str(error))
        if problems:
            raise DataError(" ".join(problems))
        return texts, label

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        (texts, label), args = columns, parts.args
        space, labelled = read_labels(tables, label, args, get_model_classes(parts.config))
        features = {
            split: _encode(rows, split, texts, parts, space if labelled[split] else None)
            for split, rows in tables.items()
        }
        extras = {
            "rows": tables, "texts": texts, "names": space.names,
            "problem_type": space.problem_type, "labelled": labelled,
            "data_name": (args.data_name or "").lower().replace("-", ""),
        }  # fmt: skip
        return parts.prepare(features, extras, {**space.get_model_settings(), _TEXTS: list(texts)})

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        texts, _ = columns
        trained_on = getattr(parts.config, _TEXTS, None) or ()
        if len(trained_on) > len(texts):
            # The answers to single texts would mean nothing.
            raise DataError(
                f"the model was trained on pairs of texts ({' and '.join(trained_on)}), and the "
                f"input has only one ({texts[0]}): give rows with both texts. --text-column and "
                "--text-pair-column name their columns."
            )
        extras = {"rows": {"test": table}, "texts": texts, **describe_outputs(parts.config)}
        return parts.prepare_input(_encode(table, "input", texts, parts, None), extras)

    def get_best_metric(self, prepared: PreparedData) -> tuple[str, bool]:
        data_name = prepared.extras.get("data_name")
        if prepared.extras.get("problem_type") == REGRESSION:
            return ("pearson", True) if data_name == "stsb" else ("loss", False)
        return ("matthews_correlation" if data_name == "cola" else "accuracy"), True

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        row = prepared.extras["rows"][split][number]
        texts = {name: row.get(name) for name in prepared.extras["texts"]}
        return texts | self.describe(record, prepared)


def _find_label(available: Sequence[str], args: DataArguments) -> str:
    """The label's column; if the text column is missing too, one error reports both."""
    try:
        return str(find_column(LABEL, available, args))
    except DataError:
        has_text = any(name in available for name in TEXT.candidates)
        if args.label_column is None and args.text_column is None and not has_text:
            raise DataError(describe_missing([TEXT, LABEL], available)) from None
        raise


def _find_texts(
    available: Sequence[str], args: DataArguments, taken: str | None = None
) -> tuple[str, ...]:
    """The column of the text and, for pairs, of the second one."""
    second = args.text_pair_column
    pair = () if second is None else (check_given(second, TEXT_PAIR.flag, available),)
    if args.text_column is None and second is None:
        for names in PAIRS:
            if set(names) <= set(available) and taken not in names:
                return names
    return (str(find_column(TEXT, available, args, taken=(*pair, taken))), *pair)


def _encode(
    rows: Any, split: str, texts: Sequence[str], parts: TextParts, space: LabelSpace | None
) -> Any:
    """The token ids of every row, and its label."""

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        values = [check_row_texts(columns[name], name, split, indices[0]) for name in texts]
        # Masks of nothing but ones: batches get them when they are padded.
        result = dict(parts.tokenizer(
            *values, truncation=True, max_length=parts.length, return_attention_mask=False
        ))  # fmt: skip
        if space is not None:
            result["labels"] = [space.encode(value) for value in columns[space.column]]
        return result

    has_columns(rows, split, texts, may_lack=())
    return parts.map_rows(rows, encode, "texts", texts, space, is_one_to_one=True)


def describe_outputs(config: Any) -> dict[str, Any]:
    """What the outputs of a saved classifier mean; older models do not record the problem type."""
    usual = REGRESSION if config.num_labels == 1 else SINGLE
    return {"names": get_output_names(config), "problem_type": config.problem_type or usual}


def describe_record(record: Record, problem_type: str, names: Sequence[str]) -> dict[str, Any]:
    """A classifier's record as the user sees it: label, score, all scores, the true label."""
    # Not with NumPy, whose calls take longer than a few classes do.
    logits = [float(logit) for logit in record["logits"]]
    truth = record.get("label")
    if problem_type == REGRESSION:
        shown: dict[str, Any] = {"score": round(logits[0], 6)}
        return shown | ({"expected": truth} if truth is not None else {})
    if problem_type == MULTI:
        scores = [_squash(logit) for logit in logits]
        shown = {"labels": [name for name, score in zip(names, scores, strict=True) if score > 0.5]}
        expected: Any = truth and [n for n, on in zip(names, truth, strict=True) if on >= 0.5]
    else:
        largest = max(logits)
        powers = [math.exp(logit - largest) for logit in logits]
        total = sum(powers)
        scores = [power / total for power in powers]
        best = logits.index(largest)
        shown = {"label": names[best], "score": round(scores[best], 6)}
        expected = names[truth] if truth is not None else None
    shown["scores"] = {n: round(score, 6) for n, score in zip(names, scores, strict=True)}
    return shown | ({"expected": expected} if truth is not None else {})


def _squash(logit: float) -> float:
    """The logistic function, which exp() of a large number must not overflow."""
    power = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else power) / (1 + power)
