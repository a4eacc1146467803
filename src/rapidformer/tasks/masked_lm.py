"""Predict masked words from their context (BERT's pre-training).

Training rows get new masks in every epoch; validation and test rows are masked once, so that every
evaluation asks for the same words. A row that already has labels is not masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables
from rapidformer.tasks.rows.rows import get_column
from rapidformer.tasks.text.text import (
    LanguageModel,
    TextParts,
    describe_block,
    encode_blocks,
    load_text_parts,
    score_blocks,
)

if TYPE_CHECKING:
    from torch import nn

_SHOWN_FILLINGS = 5


class MaskedLM(LanguageModel):
    name = "masked_lm"
    description = "predict masked words from their context (BERT-type models)"
    notes = (
        "`--mask-prob` of the tokens are chosen, at least one per row: 80 % become the mask token, "
        "10 % a random one, 10 % stay. Tokens are chosen one by one, not as whole words. The "
        "choice depends on the seed and the row, and in training on the epoch, so it does not "
        "change with micro-batches, ranks or a restart. Evaluation always asks for the same tokens."
    )
    auto_class = "AutoModelForMaskedLM"
    answer_keys = frozenset({"filled", "masks"})
    metrics = ("perplexity", "accuracy", "loss")

    def load_parts(self, args: Settings) -> TextParts:
        parts = load_text_parts(args)
        tokenizer = parts.tokenizer
        if tokenizer.mask_token_id is None:
            raise ModelError(
                f"The tokenizer of {tokenizer.name_or_path or args.tokenizer_type} has no mask "
                "token, which masked_lm needs: choose a BERT-type model, or --task causal_lm."
            )
        if not 0 < args.mask_prob < 1:
            raise ConfigurationError(f"--mask-prob {args.mask_prob} must be between 0 and 1.")
        return parts

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        from rapidformer.tasks.text.masking import MaskingCollator

        features = {}
        for split, rows in tables.items():
            blocks = encode_blocks(rows, split, columns["text"], parts, add_special=True)
            features[split] = blocks if split == "train" else _mask_once(blocks, parts)
        collate = MaskingCollator(parts.tokenizer, parts.args.mask_prob)
        return parts.prepare(features, {}, collate=collate)

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        tokenizer, column = parts.tokenizer, columns["text"]
        for number, text in enumerate(get_column(table, column), start=1):
            if tokenizer.mask_token not in str(text):
                raise DataError(
                    f"input, row {number}: there is no {tokenizer.mask_token} to fill in "
                    f"{str(text)[:60]!r}."
                )

        def encode(columns: dict[str, list[Any]], _: list[int]) -> dict[str, list[Any]]:
            return dict(tokenizer(columns[column], truncation=True, max_length=parts.length))

        extras = {"texts": get_column(table, column)}
        return parts.prepare_input(parts.map_rows(table, encode), extras)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        if "texts" in prepared.extras:
            return _fill(model, batch, prepared.processor.mask_token_id)
        return score_blocks(model(**self.drop_labels(batch)).logits, batch["labels"])

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        if "texts" not in prepared.extras:
            return describe_block(record)
        return _describe_fillings(prepared.extras["texts"][number], record, prepared.processor)


def _mask_once(blocks: Any, parts: TextParts) -> Any:
    """Evaluation rows with fixed masks, the same in every evaluation."""
    from rapidformer.tasks.text.masking import mask_row

    args, seed = parts.args, parts.args.seed % 2**63  # NumPy takes no negative seeds

    def mask(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        masked = [
            mask_row({"input_ids": ids}, (seed, index), parts.tokenizer, args.mask_prob)
            for ids, index in zip(columns["input_ids"], indices, strict=True)
        ]
        kept = {name: values for name, values in columns.items() if name != "input_ids"}
        return kept | {name: [row[name].tolist() for row in masked] for name in masked[0]}

    return parts.map_rows(blocks, mask, "mask", args.seed, args.mask_prob)


def _fill(model: nn.Module, batch: Batch, mask_id: int) -> list[Record]:
    logits = model(**batch).logits
    records: list[Record] = []
    for ids, row in zip(batch["input_ids"], logits, strict=True):
        scores = row[ids == mask_id].float().softmax(dim=-1)
        values, tokens = scores.topk(min(_SHOWN_FILLINGS, scores.shape[-1]), dim=-1)
        records.append({"tokens": tokens.cpu().numpy(), "scores": values.cpu().numpy()})
    return records


def _describe_fillings(text: str, record: Record, tokenizer: Any) -> dict[str, Any]:
    fillings = [
        [
            {"token": tokenizer.decode([int(token)]).strip(), "score": round(float(score), 6)}
            for token, score in zip(tokens, scores, strict=True)
        ]
        for tokens, scores in zip(record["tokens"], record["scores"], strict=True)
    ]
    filled = text
    for options in fillings:
        filled = filled.replace(tokenizer.mask_token, options[0]["token"], 1)
    return {"text": text, "filled": filled, "masks": fillings}
