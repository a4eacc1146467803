"""Generate a text from a text: summaries, translations (T5, BART); BLEU and ROUGE of free texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.models.configuration import get_target_limit
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables, check_row_texts
from rapidformer.tasks.evaluation.generating import (
    Generation,
    check_stop_strings,
    decode_answers,
    generate_records,
)
from rapidformer.tasks.metrics.generation import TextTally
from rapidformer.tasks.metrics.tally import Tally
from rapidformer.tasks.rows.columns import ColumnRole, check_given, find_column, find_columns
from rapidformer.tasks.rows.rows import (
    get_column,
    get_column_names,
    get_first_table,
    has_columns,
    take_rows,
)
from rapidformer.tasks.text.text import DEFAULT_TARGET_LENGTH, TextParts, TextTask

if TYPE_CHECKING:
    from torch import nn

# Tried in this order.
PAIRS: tuple[tuple[str, str], ...] = (
    ("article", "highlights"), ("document", "summary"), ("dialogue", "summary"),
    ("article", "summary"), ("text", "summary"), ("source", "target"), ("src", "tgt"),
    ("input", "output"), ("input", "target"), ("inputs", "targets"),
    ("input_text", "target_text"), ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "output"), ("question", "answer"), ("text", "target"), ("text", "label"),
)  # fmt: skip
SOURCE = ColumnRole(
    "source", "text_column", 'the source text, or {"en": ..., "de": ...} with both texts',
    (*dict.fromkeys(first for first, _ in PAIRS), "translation", "content"),
)  # fmt: skip
TARGET = ColumnRole(
    "target", "target_column", "the target text",
    (*dict.fromkeys(second for _, second in PAIRS), "title", "headline"),
)  # fmt: skip
# Columns that name the languages of each row: source and target, or both in one.
_LANGUAGE_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("source_lang", "target_lang"), ("src_lang", "tgt_lang"),
    ("source_language", "target_language"), ("language_pair",), ("lang_pair",), ("lp",),
)  # fmt: skip
# A column, or one text inside a column of dictionaries: ("translation", "de").
Path = tuple[str, ...]


class Seq2SeqLM(TextTask):
    name = "seq2seq_lm"
    description = "generate a text from a text: summaries, translations (T5, BART)"
    columns = (SOURCE, TARGET)
    tally_reads_rows = True
    auto_class = "AutoModelForSeq2SeqLM"
    streams = True
    answer_keys = frozenset({"generated"})
    metrics = ("perplexity", "bleu", "rouge1", "rouge2", "rougeL", "generated_words", "loss")

    def choose_columns(
        self, rows: Any, args: Settings, *, has_answers: bool
    ) -> tuple[Path, Path | None]:
        return _find_pair(rows, args) if has_answers else (_find_source(rows, args), None)

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        (source, target), args = columns, parts.args
        labelled = {split: _has_targets(rows, split, target) for split, rows in tables.items()}
        features = {
            split: _encode(rows, split, source, target if labelled[split] else None, parts)
            for split, rows in tables.items()
        }
        # Metrics are those of the likeliest texts, so sampling is for predictions only.
        generation = Generation(
            num_beams=args.num_beams, max_new_tokens=_get_new_tokens(args, parts.config)
        )
        extras = {
            "rows": tables, "source": source, "target": target,
            "languages": _find_languages(get_first_table(tables), source, target),
            "labelled": labelled, "generation": generation,
        }  # fmt: skip
        return parts.prepare(features, extras)

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        (source, _), args = columns, parts.args
        generation = Generation.read(args, max_new_tokens=_get_new_tokens(args, parts.config))
        check_stop_strings(generation, parts.tokenizer)
        extras = {"rows": {"test": table}, "source": source, "generation": generation}
        return parts.prepare_input(_encode(table, "input", source, None, parts), extras)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.evaluation.scoring import add_token_losses

        records = generate_records(model, batch, prepared)
        if "labels" in batch:
            add_token_losses(records, model(**batch).logits, batch["labels"])
        return records

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        extras = prepared.extras
        rows, target, languages = extras["rows"][split], extras["target"], extras["languages"]

        def read(first: int, count: int) -> tuple[list[str], list[str]]:
            part = take_rows(rows, first, count)
            wanted = check_row_texts(_read_column(part, target), target[-1], split, first)
            return wanted, _name_pairs(part, languages)

        return TextTally(lambda record: _decode(record, prepared)[0], read)

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        extras, texts = prepared.extras, _decode(record, prepared)
        rows = [extras["rows"][split][number]]
        (source,) = _read_column(rows, extras["source"])
        answer = {"source": source, "generated": texts if texts[1:] else texts[0]}
        if prepared.is_labelled(split):
            (answer["expected"],) = _read_column(rows, extras["target"])
        return answer


def _find_pair(rows: Any, args: DataArguments) -> tuple[Path, Path]:
    available = get_column_names(rows)
    languages = _get_languages(rows)
    if languages:
        source = _find_source(rows, args)
        others = [name for name in languages if name != source[1]]
        second = args.target_column or (others[0] if others else languages[-1])
        return source, ("translation", check_given(second, TARGET.flag, languages))
    if args.text_column is None and args.target_column is None:
        for pair in PAIRS:
            if set(pair) <= set(available):
                return pair[:1], pair[1:]
    columns = find_columns((TARGET, SOURCE), available, args)
    return (columns["source"],), (columns["target"],)


def _find_source(rows: Any, args: DataArguments) -> Path:
    languages = _get_languages(rows)
    if languages:
        return "translation", check_given(args.text_column or languages[0], SOURCE.flag, languages)
    return (str(find_column(SOURCE, get_column_names(rows), args)),)


def _get_languages(rows: Any) -> list[str]:
    first = rows[0].get("translation") if len(rows) else None
    return list(first) if isinstance(first, dict) else []


def _pick(values: Sequence[Any], path: Path) -> list[Any]:
    return list(values) if len(path) == 1 else [value and value.get(path[1]) for value in values]


def _read_column(rows: Any, path: Path) -> list[Any]:
    return _pick(get_column(rows, path[0]), path)


def _has_targets(rows: Any, split: str, path: Path) -> bool:
    """Whether the split has targets (a test split may lack them); checks every one of them."""
    if not has_columns(rows, split, [path[0]]):
        return False
    values = _read_column(rows, path)
    if split == "test" and all(value is None or value == "" for value in values):
        return False
    for number, text in enumerate(check_row_texts(values, path[-1], split), start=1):
        if not text.strip() and split == "train":
            raise DataError(f"{split}, row {number}: the target in {path[-1]} is empty.")
    return True


def _find_languages(rows: Any, source: Path, target: Path) -> tuple[str, ...] | str:
    """The columns with the languages of a row, or the one language pair of all rows, or ``""``."""
    if len(source) == 2:
        return f"{source[1]}-{target[1]}"
    free = set(get_column_names(rows)) - {source[0], target[0]}
    return next((names for names in _LANGUAGE_COLUMNS if free.issuperset(names)), "")


def _name_pairs(rows: Any, languages: tuple[str, ...] | str) -> list[str]:
    """The language pair of each row, such as ``en-de``; empty strings if there is none."""
    if isinstance(languages, str):
        return [languages] * len(rows)
    columns = [get_column(rows, name) for name in languages]
    return ["-".join(str(name) for name in names) for names in zip(*columns, strict=True)]


def _get_target_length(args: Settings, config: Any) -> int:
    """Tokens of a target, within the positions of the model's decoder."""
    limit = get_target_limit(config)
    for name in ("decoder_seq_length", "max_new_tokens"):
        size = getattr(args, name)
        if None not in (size, limit) and size > limit:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {size} is longer than the {limit} positions of the "
                f"model's decoder: use at most {limit}."
            )
    return int(args.decoder_seq_length or min(DEFAULT_TARGET_LENGTH, limit or math.inf))


def _get_new_tokens(args: Settings, config: Any) -> int:
    return int(args.max_new_tokens or _get_target_length(args, config))


def _encode(rows: Any, split: str, source: Path, target: Path | None, parts: TextParts) -> Any:
    tokenizer, prefix = parts.tokenizer, parts.args.source_prefix or ""
    target_length = _get_target_length(parts.args, parts.config)

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        texts = check_row_texts(_pick(columns[source[0]], source), source[-1], split, indices[0])
        texts = [prefix + text for text in texts]
        result = dict(tokenizer(texts, truncation=True, max_length=parts.length))
        # The model takes no segment ids.
        result.pop("token_type_ids", None)
        if target is not None:
            wanted = check_row_texts(
                _pick(columns[target[0]], target), target[-1], split, indices[0]
            )
            encoded = tokenizer(text_target=wanted, truncation=True, max_length=target_length)
            result["labels"] = encoded["input_ids"]
        return result

    return parts.map_rows(
        rows, encode, "pairs", source, target, prefix, target_length, is_one_to_one=True
    )


def _decode(record: Mapping[str, Any], prepared: PreparedData) -> list[str]:
    generation = prepared.extras["generation"]
    texts = decode_answers(record["generated"], prepared.processor, generation)
    return [text.strip() for text in texts]
