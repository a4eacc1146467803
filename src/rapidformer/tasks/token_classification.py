"""Tag every word: named entities, parts of speech.

A word may be several tokens. In evaluation, only the first token of a word carries its tag, so that
every word counts once; `--label-all-tokens` affects only training. Rows without tags get a
placeholder, which marks where the words begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.log import warn
from rapidformer.tasks.base import IGNORED_LABEL, Batch, PreparedData, Record, Tables, Task
from rapidformer.tasks.labels.checks import collect_labels
from rapidformer.tasks.labels.labels import (
    LabelSpace,
    ModelClasses,
    get_leading_split,
    get_model_classes,
    get_output_names,
    read_classes,
)
from rapidformer.tasks.metrics.classification import (
    EntityTally,
    TagTally,
    find_entities,
    has_entity_tags,
)
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.rows import (
    filter_stream,
    get_class_names,
    get_column,
    is_row_stream,
    select_rows,
)
from rapidformer.tasks.text.text import TextParts, check_is_fast, load_text_parts

if TYPE_CHECKING:
    from torch import nn

# These keep the space before a word as part of it, so given words need one prepended.
_SPACE_KEEPING = frozenset({"gpt2", "roberta", "bloom", "deberta", "longformer", "bart"})

WORDS = ColumnRole(
    "words", "text_column", "the words of a sentence (a list, or a string that is split at spaces)",
    ("tokens", "words", "text", "sentence"),
)  # fmt: skip
TAGS = ColumnRole(
    "tags", "label_column", "one tag per word (strings such as B-PER, or integers)",
    ("ner_tags", "tags", "labels", "label", "pos_tags", "chunk_tags", "ner", "upos"),
)  # fmt: skip


class TokenClassification(Task):
    name = "token_classification"
    description = "tag every word: named entities, parts of speech"
    columns = (WORDS, TAGS)
    auto_class = "AutoModelForTokenClassification"
    learns_classes = True
    answer_keys = frozenset({"tags", "scores", "entities"})
    metrics = ("precision", "recall", "f1", "accuracy", "loss")
    answer_role = TAGS.name
    streams = True
    best_metric = "f1"
    greater_is_better = True

    def check_head(self, rows: list[Record], args: Settings, *, has_answers: bool) -> None:
        columns = self.choose_columns(rows, args, has_answers=has_answers)
        if has_answers:
            names = columns["words"], columns["tags"]
            for number, row in enumerate(rows, start=1):
                words, tags = (row.get(name) for name in names)
                if tags is not None:  # in all rows of a test set without labels
                    _check_pair(words, tags, f"row {number}", names)

    def load_parts(self, args: Settings) -> TextParts:
        from rapidformer.models.configuration import load_config

        keeps_spaces = load_config(args).model_type in _SPACE_KEEPING
        parts = load_text_parts(args, **({"add_prefix_space": True} if keeps_spaces else {}))
        check_is_fast(parts.tokenizer, "token_classification")
        return parts

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        tags, words, model = columns["tags"], columns["words"], get_model_classes(parts.config)
        space, labelled = _read_tags(tables, words, tags, parts.args, model)
        features = {
            split: _encode(rows, split, words, space if labelled[split] else None, parts)
            for split, rows in tables.items()
        }
        if "train" in features:
            features["train"] = _drop_empty(features["train"])
        settings = {k: v for k, v in space.get_model_settings().items() if k != "problem_type"}
        extras = {"rows": tables, "words": words, "names": space.names, "labelled": labelled}
        return parts.prepare(features, extras, settings)

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        words, names = columns["words"], get_output_names(parts.config)
        extras = {"rows": {"test": table}, "words": words, "names": names}
        return parts.prepare_input(_encode(table, "input", words, None, parts), extras)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.evaluation.scoring import score_tokens

        labels = batch["labels"]
        logits = model(**self.drop_labels(batch)).logits
        losses, counts, _ = score_tokens(logits, labels)
        confidences, guesses = logits.float().softmax(dim=-1).max(dim=-1)
        guesses, confidences = guesses.cpu().numpy(), confidences.cpu().numpy()
        truths = labels.cpu().numpy()
        columns = {"guesses": guesses, "scores": confidences, "labels": truths}
        return [
            {name: values[row][is_marked] for name, values in columns.items()}
            | {"loss": losses[row], "count": counts[row]}
            for row, is_marked in enumerate(truths != IGNORED_LABEL)
        ]

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        names = prepared.extras["names"]
        return EntityTally(names) if has_entity_tags(names) else TagTally(names)

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        names = prepared.extras["names"]
        words = _as_words(prepared.extras["rows"][split][number].get(prepared.extras["words"]))
        # Words beyond the model's length were not seen: predict no tag for them.
        tags = [names[tag] for tag in record["guesses"]]
        row: dict[str, Any] = {"words": words[: len(tags)], "tags": tags}
        row["scores"] = [round(float(score), 6) for score in record["scores"]]
        if has_entity_tags(names):
            row["entities"] = [
                {"type": kind, "text": " ".join(words[first : last + 1])}
                | {"first": first, "last": last}
                for kind, first, last in find_entities(tags)
            ]
        if prepared.is_labelled(split):
            row["expected"] = [names[tag] for tag in record["labels"]]
        if len(words) > len(tags):
            row["words_not_seen"] = len(words) - len(tags)
        return row


def _as_words(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else [str(word) for word in value or ()]


def _read_tags(
    tables: Mapping[str, Any], words: str, tags: str, args: Settings, model: ModelClasses
) -> tuple[LabelSpace, dict[str, bool]]:
    """The tags of all splits; checks that each row has one tag per word."""
    values, labelled = collect_labels(tables, tags)
    for split, cells in values.items():
        pairs = zip(get_column(tables[split], words), cells, strict=True)
        for number, (row_words, row_tags) in enumerate(pairs, start=1):
            _check_pair(row_words, row_tags, f"{split}, row {number}", (words, tags))
    leading = tables[get_leading_split(values)]
    names = get_class_names(leading, tags)
    by_row = {split: [_as_tags(value) for value in rows] for split, rows in values.items()}
    is_head = is_row_stream(leading)
    return read_classes(by_row, tags, names, args, model, is_head=is_head), labelled


def _check_pair(words: Any, tags: Any, where: str, columns: tuple[str, str]) -> None:
    if words is None or tags is None:
        raise DataError(f"{where}: the words or the tags are missing.")
    for value, name in zip((words, tags), columns, strict=True):
        if not isinstance(value, (str, Sequence)):
            raise DataError(
                f"{where}: {name} holds {value!r}, and tagging needs one tag for each word. To "
                "learn one label for a whole text, use --task sequence_classification."
            )
    counts = len(_as_words(words)), len(_as_tags(tags))
    if counts[0] != counts[1]:
        raise DataError(
            f"{where}: {counts[0]} words in {columns[0]} but {counts[1]} tags in {columns[1]}; "
            "each word needs one tag."
        )


def _as_tags(value: Any) -> list[Any]:
    return value.split() if isinstance(value, str) else list(value)


def _encode(rows: Any, split: str, words: str, space: LabelSpace | None, parts: TextParts) -> Any:
    every_piece = bool(parts.args.label_all_tokens) and split == "train"
    inside = _get_inside_tags(space.names) if space and every_piece else None

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        sentences = [_as_words(value) for value in columns[words]]
        result = parts.tokenizer(
            sentences, is_split_into_words=True, truncation=True, max_length=parts.length
        )
        aligned = []
        for row, sentence in enumerate(sentences):
            ids = [0] * len(sentence)
            if space is not None:
                tags, where = columns[space.column][row], f"{split}, row {indices[row] + 1}"
                _check_pair(sentence, tags, where, (words, space.column))
                ids = [space.encode(tag) for tag in _as_tags(tags)]
            aligned.append(_align(result.word_ids(row), ids, inside))
        return {**result, "labels": aligned}

    return parts.map_rows(rows, encode, "words", words, space, every_piece)


def _align(
    word_ids: Sequence[int | None], labels: Sequence[int], inside: Mapping[int, int] | None
) -> list[int]:
    """A label for every token; with ``inside``, also for those that continue a word."""
    aligned, last = [], None
    for word in word_ids:
        if word is None or (word == last and inside is None):
            aligned.append(IGNORED_LABEL)
        elif word == last and inside is not None:
            aligned.append(inside.get(labels[word], labels[word]))
        else:
            aligned.append(labels[word])
        last = word
    return aligned


def _get_inside_tags(names: Sequence[str]) -> dict[int, int]:
    """B-PER on the first token of a word is I-PER on the others."""
    return {
        index: names.index("I-" + name[2:])
        for index, name in enumerate(names)
        if name.startswith("B-") and "I-" + name[2:] in names
    }


def _drop_empty(features: Any) -> Any:
    """Drop rows without any tag: the mean loss of a batch of them would be 0 / 0."""
    if is_row_stream(features):
        return filter_stream(features, lambda row: set(row["labels"]) != {IGNORED_LABEL})
    labels = get_column(features, "labels")
    keep = [i for i, row in enumerate(labels) if any(label != IGNORED_LABEL for label in row)]
    dropped = len(features) - len(keep)
    if not dropped:
        return features
    warn("train: dropped %d rows without words.", dropped)
    return select_rows(features, keep)
