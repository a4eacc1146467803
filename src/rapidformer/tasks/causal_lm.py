"""Predict the next token from those before it (GPT's pre-training), and generate text or answers.

Plain text becomes blocks; conversations, and prompts with answers, become examples of which only
the answers are trained on. Labels are not shifted here, the *model* shifts them, so the first token
of a row has no prediction and does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ModelError
from rapidformer.log import get_logger, warn, warn_once
from rapidformer.models.location import get_model_location
from rapidformer.tasks.base import IGNORED_LABEL, Batch, PreparedData, Record, Row, Tables
from rapidformer.tasks.chat.columns import (
    CONTEXT,
    MESSAGES,
    PROMPT,
    RESPONSE,
    SYSTEM,
    ChatColumns,
    find_chat_columns,
)
from rapidformer.tasks.evaluation.generating import (
    Generation,
    check_stop_strings,
    describe_answers,
    divide_length,
    generate_records,
)
from rapidformer.tasks.rows.columns import ColumnRole, as_optional, find_column
from rapidformer.tasks.rows.rows import (
    as_rows,
    drop_columns,
    get_column,
    get_column_names,
    is_row_stream,
    take_rows,
)
from rapidformer.tasks.text.text import (
    TEXT,
    LanguageModel,
    TextParts,
    build_text_collator,
    describe_block,
    encode_blocks,
    get_context_length,
    load_text_parts,
    score_blocks,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

_DEFAULT_NEW_TOKENS = 64
_DEFAULT_NEW_TOKENS_IN_CHAT = 512


class CausalLM(LanguageModel):
    name = "causal_lm"
    description = (
        "predict the next token in plain text, conversations or answers to prompts (GPT-type "
        "models)"
    )
    columns: tuple[ColumnRole, ...] = (
        as_optional(TEXT), MESSAGES, as_optional(PROMPT), as_optional(RESPONSE), CONTEXT, SYSTEM,
    )  # fmt: skip
    auto_class = "AutoModelForCausalLM"
    answer_keys = frozenset({"generated"})
    metrics: tuple[str, ...] = ("perplexity", "accuracy", "loss")
    has_shifted_labels = True

    def load_parts(self, args: Settings) -> TextParts:
        parts = load_text_parts(args, allows_towers=True)
        check_is_causal(parts.config, args)
        return parts

    def load_tables(self, parts: TextParts, splits: Mapping[str, Any] | None) -> dict[str, Any]:
        tables = super().load_tables(parts, splits)
        parts.check_is_text(tables)
        return tables

    def read_input(self, rows: Sequence[Row], parts: TextParts) -> list[Record]:
        from rapidformer.tasks.chat.prompts import name_column

        table = as_rows(rows, name_column(rows, parts.tokenizer, parts.args))
        parts.check_is_text({"input": table})
        return table

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> Any:
        """Those of conversations, or the column of plain text."""
        chat = find_chat_columns(rows, args, TEXT, has_answers=has_answers)
        return chat or str(find_column(TEXT, get_column_names(rows), args))

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        args, is_text = parts.args, isinstance(columns, str)
        collate: Any = build_text_collator(parts.tokenizer, side="right")
        is_packed = args.packing and not (is_text and args.group_texts)
        encode = _encode_texts if is_text else _encode_chats
        features, extras = encode(tables, columns, parts)
        for split, rows in features.items():
            if rows is not None and is_packed:
                features[split] = _pack(rows, split, parts.length)
            elif rows is not None and not is_text:
                features[split] = drop_columns(rows, ["length"])
        if not is_packed:
            collate = LabelCollator(collate)
        extras = {"packed_length": parts.length if is_packed else None, **extras}
        return parts.prepare(features, extras, collate=collate)

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        from rapidformer.tasks.chat.prompts import encode_beginnings, encode_questions

        args, tokenizer, limit = parts.args, parts.tokenizer, parts.length
        if args.seq_length is None:
            limit = get_context_length(tokenizer, parts.config)
        usual = _DEFAULT_NEW_TOKENS_IN_CHAT if args.chat else _DEFAULT_NEW_TOKENS
        length, new_tokens = divide_length(limit, args, usual)
        generation = Generation.read(args, max_new_tokens=new_tokens)
        check_stop_strings(generation, tokenizer)
        encode = encode_beginnings if isinstance(columns, str) else encode_questions
        features, extras = encode(table, columns, tokenizer, length, args)
        more = {"generation": generation, "prompt_length": length}
        return parts.prepare_input(features, {**more, **extras}, side="left")

    def build_model(
        self, args: Settings, prepared: PreparedData, *, must_be_trained: bool = False
    ) -> nn.Module:
        model: Any = super().build_model(args, prepared, must_be_trained=must_be_trained)
        # transformers does not recognize GPT-2's loss by its class name, and would warn each time.
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"
        if prepared.extras.get("packed_length"):
            from rapidformer.tasks.text.packed_attention import apply_packed_attention

            apply_packed_attention(model, prepared.extras["packed_length"])
        if prepared.extras.get("stop_id") is not None:
            add_stop(model, prepared.extras["stop_id"], prepared.processor)
        return model

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        from rapidformer.tasks.text.packed_attention import get_inputs

        return model(**get_inputs(model, batch)).loss

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        if "generation" in prepared.extras:
            return generate_records(model, batch, prepared)
        return self.score(model, batch, prepared)

    def score(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        """The records of an evaluation."""
        from rapidformer.tasks.evaluation.scoring import shift_labels
        from rapidformer.tasks.text.packed_attention import get_inputs

        inputs = get_inputs(model, self.drop_labels(batch))
        return score_blocks(model(**inputs).logits, shift_labels(batch["labels"]))

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        if "generation" in prepared.extras:
            return describe_answers(record, prepared, number)
        if "by_token" in record and "shown" not in record:
            return describe_block(record)
        return dict(record.get("shown", record))


def check_is_causal(config: Any, args: Settings) -> None:
    """Refuse an encoder: under a causal head, its tokens see those that they are to predict."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_turned = getattr(config, "is_decoder", getattr(config, "causal", False))
    if is_encoder and not config.is_encoder_decoder and not is_turned:
        raise ModelError(
            f"{get_model_location(args) or config.model_type} ({config.model_type}) is an encoder: "
            f"under --task {args.task}, every token would see the next one, which it is to "
            "predict. Use --task masked_lm, or a model that reads from left to right."
        )


def _encode_texts(
    tables: Mapping[str, Any], column: str, parts: TextParts
) -> tuple[dict[str, Any], dict[str, Any]]:
    args = parts.args
    if args.chat_template is not None or args.train_on_prompts:
        warn_once(
            "--chat-template and --train-on-prompts have no effect on plain text: name the "
            "columns with --messages-column, or --prompt-column and --response-column."
        )
    if args.packing and args.group_texts:
        warn_once(
            "--packing has no effect on plain text, whose rows are already full; with "
            "--no-group-texts, each text is a separate example."
        )
    features = {
        split: encode_blocks(rows, split, column, parts, add_special=False)
        for split, rows in tables.items()
    }
    return features, {"stop_id": None}


def _encode_chats(
    tables: Mapping[str, Any], columns: ChatColumns, parts: TextParts
) -> tuple[dict[str, Any], dict[str, Any]]:
    from rapidformer.tasks.chat.features import build_encoder, encode_chats, join_splits

    encoder = build_encoder(parts.tokenizer, columns, parts.args, parts.length)
    kept = {
        split: encode_chats(rows, split, encoder, parts.args.preprocessing_workers)
        for split, rows in tables.items()
    }
    features, facts = join_splits(kept)
    return features, {**facts, "stop_id": encoder.get_stop_id()}


def _pack(rows: Any, split: str, length: int) -> Any:
    from rapidformer.data.packing import PackedRows, pack_lengths

    if is_row_stream(rows):  # chunk by chunk

        def pack(part: list[Any], _: list[int]) -> list[Any]:
            sizes = [len(row["input_ids"]) for row in part]
            packed = PackedRows(part, pack_lengths(sizes, length))
            return [packed[number] for number in range(len(packed))]

        return rows.then(pack, expands=True)
    lengths = _get_lengths(rows)
    packed = pack_lengths(lengths, length)
    tokens, longest = sum(lengths), max(lengths)
    filled = max(sum(lengths[number] for number in row) for row in packed)
    padding, unpacked = 1 - tokens / (filled * len(packed)), 1 - tokens / (longest * len(lengths))
    get_logger().info(
        "packing   %s: %s examples in %s rows, %.1f%% padding (%.1f%% unpacked, if all rows are "
        "padded to the longest)",
        split, f"{len(lengths):,}", f"{len(packed):,}", 100 * padding, 100 * unpacked,
    )  # fmt: skip
    if padding > unpacked and 2 * longest > length:  # otherwise only the last row is padded
        warn(
            "--packing adds padding to %s (%.1f%% instead of %.1f%%): the examples are about as "
            "long as the rows. Omit it, or use a --seq-length of at least %d.",
            split, 100 * padding, 100 * unpacked, 2 * longest,
        )  # fmt: skip
    return PackedRows(rows, packed)


def _get_lengths(rows: Any) -> list[int]:
    if "length" in get_column_names(rows[:1] if isinstance(rows, list) else rows):
        return get_column(rows, "length")
    # In chunks: all tokens of a large table as Python integers would not fit into memory.
    parts = (take_rows(rows, start, 1000) for start in range(0, len(rows), 1000))
    return [len(ids) for part in parts for ids in get_column(part, "input_ids")]


def add_stop(model: Any, stop_id: int, tokenizer: Any) -> None:
    """Let generation also stop at the end of a turn; saved with the model, for other programs."""
    known = model.generation_config.eos_token_id
    ids = known if isinstance(known, list) else [tokenizer.eos_token_id if known is None else known]
    if stop_id not in ids:
        kept = [token for token in ids if token is not None]
        model.generation_config.eos_token_id = [*kept, stop_id]


class LabelCollator:
    """Gives rows without labels, those of plain text, their inputs as labels."""

    def __init__(self, pad: Any) -> None:
        self.pad = pad

    def __call__(self, rows: list[Any]) -> Batch:
        labelled = ["labels" in row for row in rows]
        if all(labelled):
            return self.pad(rows)
        if any(labelled):  # conversations and plain text, of a mixture
            return self([{"labels": row["input_ids"], **row} for row in rows])
        batch = self.pad(rows)
        # By the mask, not by the id: GPT-2 pads with its end-of-text token, which it must learn.
        is_padding = batch["attention_mask"] == 0
        return {**batch, "labels": batch["input_ids"].masked_fill(is_padding, IGNORED_LABEL)}
