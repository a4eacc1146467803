"""What the text tasks have in common: the tokenizer, row length, padding and model settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.rows.rows import RowFunction, map_rows

if TYPE_CHECKING:
    from rapidformer.data.collate import PadCollator

DEFAULT_LENGTH = 512
DEFAULT_TARGET_LENGTH = 128
_NO_LIMIT = 1 << 20


class TextParts(NamedTuple):
    """What every text task starts from."""

    config: Any
    tokenizer: Any
    length: int
    """Tokens per row."""
    args: Settings

    def map_rows(self, rows: Any, encode: RowFunction, *key: Any) -> Any:
        """Features of rows; ``key`` is what they depend on besides the tokenizer and the length."""
        whole = (*key, self.length, get_tokenizer_key(self.tokenizer))
        return map_rows(rows, encode, workers=self.args.preprocessing_workers, key=whole)

    def prepare(
        self,
        features: Mapping[str, Any],
        extras: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        *,
        side: str | None = None,
        collate: Any = None,
    ) -> PreparedData:
        """The splits of a task, padded with the tokenizer's ids, and the settings of its model."""
        return PreparedData(
            **features,
            collate=collate or build_text_collator(self.tokenizer, side),
            processor=self.tokenizer,
            model_settings={**(settings or {}), **self._get_model_settings()},
            extras=extras,
        )

    def prepare_input(
        self, features: Any, extras: Mapping[str, Any], side: str | None = None
    ) -> PreparedData:
        """Rows to predict on, without labels."""
        return PreparedData(
            test=features,
            collate=build_text_collator(self.tokenizer, side),
            processor=self.tokenizer,
            extras={"labelled": {"test": False}, **extras},
        )

    def _get_model_settings(self) -> dict[str, Any]:
        """Settings of the model that follow from the tokenizer."""
        from rapidformer.models.location import is_from_scratch

        tokenizer, config = self.tokenizer, self.config
        # Ids may have gaps, so the largest id counts, not the number of tokens.
        needed = max(tokenizer.get_vocab().values(), default=0) + 1
        settings: dict[str, Any] = {}
        if is_from_scratch(self.args):
            if self.args.vocab_size is None:
                settings["vocab_size"] = needed
            settings |= _get_special_ids(tokenizer, config)
        elif config.pad_token_id is None:
            # Classifiers on GPT-like models look for the last token that is not padding.
            settings["pad_token_id"] = tokenizer.pad_token_id
        size = settings.get("vocab_size") or getattr(config, "vocab_size", None)
        if size is not None and needed > size:
            raise ModelError(
                f"The tokenizer needs {needed} token embeddings, but the model has {size}: use the "
                "model's own tokenizer."
            )
        return settings


def load_text_parts(args: Settings, **options: Any) -> TextParts:
    """The model's configuration, its tokenizer (loaded with the options) and the row length."""
    from rapidformer.models.build import load_tokenizer
    from rapidformer.models.configuration import load_config

    config, tokenizer = load_config(args), load_tokenizer(args, **options)
    return TextParts(config, tokenizer, get_max_length(args, tokenizer, config), args)


def get_max_length(args: Settings, tokenizer: Any, config: Any) -> int:
    """Tokens per row: --seq-length, or the model's limit, at most 512."""
    from rapidformer.models.configuration import get_position_limit

    limit = get_position_limit(config)
    if args.seq_length is None:
        # A tokenizer without a limit reports 1e30.
        return int(min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH, tokenizer.model_max_length))
    if limit is not None and args.seq_length > limit:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} is longer than the {limit} positions of the model: "
            f"use at most {limit}."
        )
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if args.seq_length <= special:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} leaves no room besides the {special} special tokens: "
            f"use at least {special + 1}."
        )
    return int(args.seq_length)


def get_context_length(tokenizer: Any, config: Any) -> int:
    """Tokens that the model can see at once: prompt and answer together."""
    from rapidformer.models.configuration import get_position_limit

    # A tokenizer without a limit reports 1e30.
    return int(min(get_position_limit(config) or _NO_LIMIT, tokenizer.model_max_length, _NO_LIMIT))


def _get_special_ids(tokenizer: Any, config: Any) -> dict[str, Any]:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id if begin is None else begin,
        "eos_token_id": tokenizer.sep_token_id if end is None else end,
    }
    if config.is_encoder_decoder:
        # As in T5: the decoder starts with padding, which no target begins with.
        ids["decoder_start_token_id"] = ids["pad_token_id"]
        ids["forced_eos_token_id"] = None
    return ids


def build_text_collator(tokenizer: Any, side: str | None = None) -> PadCollator:
    """Dynamic padding with the tokenizer's own ids, on the side that the model was trained with."""
    from rapidformer.data.collate import PadCollator

    pads = {
        "input_ids": tokenizer.pad_token_id or 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0) or 0,
    }
    return PadCollator(pads, side=side or tokenizer.padding_side)


def get_tokenizer_key(tokenizer: Any) -> str:
    """A short hash of the tokenizer: equal if and only if it tokenizes the same way."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    text += repr((tokenizer.special_tokens_map, tokenizer.truncation_side))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_is_fast(tokenizer: Any, task: str) -> None:
    """Refuse a slow tokenizer, which cannot tell which characters a token came from."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{task} needs a fast tokenizer (tokenizer.json), which {tokenizer.name_or_path} does "
            "not have: choose a model that has one."
        )
