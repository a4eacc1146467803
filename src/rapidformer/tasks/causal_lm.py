"""The next token from those before it (GPT's own training), and text that goes on.

What a reader would get wrong: labels equal the inputs and the *model* shifts them, so the first
token of a row has no prediction and does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ConfigurationError
from rapidformer.tasks.base import PreparedData, Record
from rapidformer.tasks.columns import find_column
from rapidformer.tasks.language_model import TEXT, LanguageModel, describe_blocks, score_blocks

if TYPE_CHECKING:
    import torch
    from torch import nn

_DEFAULT_NEW_TOKENS = 64


class CausalLM(LanguageModel):
    name = "causal_lm"
    # The documents of the original system spell it "casual".
    aliases = ("casual_lm", "clm", "language_modeling", "text_generation")
    description = "the next token from those before it (GPT-type models)"
    auto_class = "AutoModelForCausalLM"
    has_shifted_labels = True

    def prepare(self, args: Any, splits: Mapping[str, Any] | None = None) -> PreparedData:
        from rapidformer.tasks.blocks import encode_blocks
        from rapidformer.tasks.rows import get_column_names, get_splits
        from rapidformer.tasks.text import build_text_collator, get_text_settings, load_text_parts

        config, tokenizer, length = load_text_parts(args)
        tables = get_splits(args, splits)
        column = str(find_column(TEXT, get_column_names(next(iter(tables.values()))), args))
        features = {
            split: encode_blocks(rows, split, column, tokenizer, length, args, add_special=False)
            for split, rows in tables.items()
        }
        return PreparedData(
            **features,
            collate=LabelCollator(build_text_collator(tokenizer, side="right")),
            processor=tokenizer,
            model_settings=get_text_settings(args, tokenizer, config),
            extras={"mode": "evaluate"},
        )

    def prepare_for_prediction(
        self, args: Any, rows: Sequence[dict[str, Any] | str]
    ) -> PreparedData:
        from rapidformer.tasks.rows import as_rows, get_column, get_column_names, map_rows
        from rapidformer.tasks.text import build_text_collator, load_text_parts

        _, tokenizer, limit = load_text_parts(args)
        table = as_rows(rows, args.text_column or "text")
        column = str(find_column(TEXT, get_column_names(table), args))
        new_tokens = args.max_new_tokens or min(_DEFAULT_NEW_TOKENS, max(1, limit // 2))
        if new_tokens >= limit:
            raise ConfigurationError(
                f"--max-new-tokens {new_tokens} leaves no room for the prompt in {limit} tokens: "
                f"use at most {limit - 1}."
            )
        length = limit - new_tokens
        # A prompt that is too long loses its beginning: what comes next hangs on its end.
        tokenizer.truncation_side = "left"

        def encode(columns: dict[str, list[Any]], _: list[int]) -> dict[str, list[Any]]:
            encoded = tokenizer(
                columns[column], truncation=True, max_length=length, add_special_tokens=False
            )
            start = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0]
            ids = [list(row) or start for row in encoded["input_ids"]]
            return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

        return PreparedData(
            test=map_rows(table, encode, workers=None, key=()),
            collate=build_text_collator(tokenizer, side="left"),
            processor=tokenizer,
            extras={
                "mode": "predict",
                "texts": get_column(table, column),
                "labelled": {"test": False},
                "generation": {"num_beams": args.num_beams, "max_new_tokens": new_tokens},
            },
        )

    def build_model(self, args: Any, prepared: PreparedData) -> nn.Module:
        model: Any = super().build_model(args, prepared)
        # By its class's name transformers cannot tell GPT-2's loss, and would warn each time.
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"
        built: nn.Module = model
        return built

    def evaluate_step(
        self, model: nn.Module, batch: dict[str, torch.Tensor], prepared: PreparedData
    ) -> list[Record]:
        from rapidformer.tasks.generating import generate
        from rapidformer.tasks.scoring import shift_labels

        if prepared.extras["mode"] == "predict":
            ids = generate(model, batch, prepared.processor, **prepared.extras["generation"])
            width = batch["input_ids"].shape[1]
            return [{"generated": row[width:]} for row in ids]
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        return score_blocks(logits, shift_labels(batch["labels"]))

    def predictions(
        self, records: list[Record], prepared: PreparedData, split: str
    ) -> list[dict[str, Any]]:
        if prepared.extras["mode"] == "predict":
            decode = prepared.processor.decode
            return [
                {"text": text, "generated": decode(record["generated"], skip_special_tokens=True)}
                for text, record in zip(prepared.extras["texts"], records, strict=True)
            ]
        return describe_blocks(records)


class LabelCollator:
    """Adds labels equal to the inputs, except where a row is padded."""

    def __init__(self, pad: Any) -> None:
        self.pad = pad

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = self.pad(rows)
        labels = batch["input_ids"].clone()
        # By the mask, not by the id: GPT-2 pads with its end-of-text token, which it must learn.
        labels[batch["attention_mask"] == 0] = -100
        batch["labels"] = labels
        return batch
