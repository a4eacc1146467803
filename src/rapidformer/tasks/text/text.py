"""What the text tasks have in common: tokenizer, row length, padding, model settings, blocks.

With `group_texts`, texts are joined and cut into blocks of exactly the sequence length; the rest of
a batch of 1000 texts is a shorter one. Without it, each text is one row, truncated to the length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.log import warn_once
from rapidformer.tasks.base import PreparedData, Record, Task, check_row_texts
from rapidformer.tasks.metrics.tally import Tally, TokenTally, compute_perplexity
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.named_files import check_no_images
from rapidformer.tasks.rows.rows import RowFunction, as_table, map_rows

if TYPE_CHECKING:
    import torch

    from rapidformer.data.collate import PadCollator

DEFAULT_LENGTH = 512
DEFAULT_TARGET_LENGTH = 128
_NO_LIMIT = 1 << 20
TEXT = ColumnRole(
    "text", "text_column", "the text",
    ("text", "content", "sentence", "document", "article", "review", "code"),
)  # fmt: skip


class TextParts(NamedTuple):
    """What every text task starts from."""

    config: Any
    tokenizer: Any
    length: int
    """Tokens per row."""
    args: Settings
    recipe: Any = None
    """What else is saved with a model of texts as vectors."""

    def check_is_text(self, tables: Mapping[str, Any]) -> None:
        """Refuse rows with something for the model's towers, which would be left out."""
        if self.has_towers:
            check_no_images(tables, self.args)

    @property
    def has_towers(self) -> bool:
        """Whether the model also sees or hears."""
        from rapidformer.models.towers import reads_more_than_text

        return reads_more_than_text(self.config)

    def map_rows(
        self, rows: Any, encode: RowFunction, *key: Any, is_one_to_one: bool = False
    ) -> Any:
        """Features of rows; ``key`` is what they depend on besides the tokenizer and the length."""
        whole = (*key, self.length, get_tokenizer_key(self.tokenizer))
        workers = self.args.preprocessing_workers
        return map_rows(rows, encode, workers=workers, key=whole, is_one_to_one=is_one_to_one)

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
        from rapidformer.models.processor_files import keep_processor_files

        return PreparedData(
            **features, collate=collate or build_text_collator(self.tokenizer, side),
            processor=self.tokenizer,
            saved=keep_processor_files(self.tokenizer, self.args) if self.has_towers else None,
            model_settings={**(settings or {}), **self._get_model_settings()}, extras=extras,
        )  # fmt: skip

    def prepare_input(
        self, features: Any, extras: Mapping[str, Any], side: str | None = None
    ) -> PreparedData:
        """Rows to predict on, without labels."""
        return PreparedData(
            test=features, collate=build_text_collator(self.tokenizer, side),
            processor=self.tokenizer, extras={"labelled": {"test": False}, **extras},
        )  # fmt: skip

    def _get_model_settings(self) -> dict[str, Any]:
        """Settings of the model that follow from the tokenizer."""
        from rapidformer.models.location import is_from_scratch
        from rapidformer.models.towers import get_text_config

        tokenizer, config = self.tokenizer, get_text_config(self.config)
        settings: dict[str, Any] = {}
        if is_from_scratch(self.args):
            if self.args.vocab_size is None:
                settings["vocab_size"] = _count_ids(tokenizer)
            settings |= _get_special_ids(tokenizer, config)
        elif config.pad_token_id is None and config is self.config:
            # Classifiers on GPT-like models look for the last token that is not padding.
            settings["pad_token_id"] = tokenizer.pad_token_id
        check_vocabulary(
            tokenizer, settings.get("vocab_size") or getattr(config, "vocab_size", None)
        )
        return settings


def check_vocabulary(tokenizer: Any, size: int | None) -> None:
    """Refuse a tokenizer with ids that a model with so many embeddings does not have."""
    needed = _count_ids(tokenizer)
    if size is not None and needed > size:
        raise ModelError(
            f"The tokenizer needs {needed} token embeddings, but the model has {size}: use the "
            "model's own tokenizer."
        )


def _count_ids(tokenizer: Any) -> int:
    # Ids may have gaps, so the largest id counts, not the number of tokens.
    return max(tokenizer.get_vocab().values(), default=0) + 1


def load_text_parts(args: Settings, *, allows_towers: bool = False, **options: Any) -> TextParts:
    """The model's configuration, its tokenizer (loaded with the options) and the row length.

    With ``allows_towers``, the task may train the language part of a model that sees or hears.
    """
    from rapidformer.models.build import load_tokenizer
    from rapidformer.models.configuration import load_config

    config = load_config(args)
    check_towers(config, args, allows_towers=allows_towers)
    tokenizer = load_tokenizer(args, **options)
    return TextParts(config, tokenizer, get_max_length(args, tokenizer, config), args)


def check_towers(config: Any, args: Settings, *, allows_towers: bool) -> None:
    """Refuse a model that also sees or hears if it cannot be trained whole on text."""
    from rapidformer.models.location import get_model_location
    from rapidformer.models.towers import find_text_problem, reads_more_than_text

    if args.train_vision or args.train_projector:
        raise ConfigurationError(
            f"--train-vision and --train-projector need images, and --task {args.task} reads text "
            "alone: leave them out, or use --task image_text."
        )
    if not reads_more_than_text(config):
        return
    name = f"{get_model_location(args)} ({config.model_type})"
    if not allows_towers:
        raise ModelError(
            f"{name} also reads images or sound, and --task {args.task} trains models of text "
            "alone: give one of those, or train this one in a script of your own."
        )
    problem = find_text_problem(config)
    if problem is not None:
        raise ModelError(
            f"{name} also reads images or sound, and cannot be trained on text alone: {problem}. "
            "Give another model, or train this one in a script of your own."
        )


def get_max_length(
    args: DataArguments, tokenizer: Any, config: Any, default: int = DEFAULT_LENGTH
) -> int:
    """Tokens per row: --seq-length, or the model's limit, at most the task's default."""
    from rapidformer.models.configuration import get_position_limit, get_size

    limit = get_position_limit(config)
    if args.seq_length is None:
        # A tokenizer without a limit reports 1e30.
        return int(min(default, limit or default, tokenizer.model_max_length))
    if limit is not None and args.seq_length > limit:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} is longer than the {limit} positions of the model: "
            f"use at most {limit}."
        )
    known = get_size(config, "max_position_embeddings") or args.seq_length
    if args.seq_length > known:  # rotary positions have no end
        warn_once(
            f"--seq-length {args.seq_length} is beyond the {known} positions that the model was "
            "trained for, and it may read such rows badly: use at most that many, or extend its "
            "rope_parameters in config.json."
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


def encode_blocks(
    rows: Any, split: str, column: str, parts: TextParts, *, add_special: bool
) -> Any:
    """Token rows, framed as the tokenizer does (``add_special``), or texts with an end token."""
    tokenizer, groups = parts.tokenizer, parts.args.group_texts
    before, after = get_frame(tokenizer) if add_special else ([], [])
    room = parts.length - len(before) - len(after)
    end = [] if add_special or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        texts = check_row_texts(columns[column], column, split, indices[0])
        texts = [text for text in texts if text.strip()]
        ids = tokenize(texts, tokenizer) if texts else []
        if groups:
            joined = list(chain.from_iterable([*text, *end] for text in ids))
            pieces = [joined[start : start + room] for start in range(0, len(joined), room)]
        else:
            pieces = [[*text, *end][:room] for text in ids]
        framed = [[*before, *piece, *after] for piece in pieces if len(piece) > 1 or add_special]
        return {"input_ids": framed, "attention_mask": [[1] * len(row) for row in framed]}

    result = parts.map_rows(rows, encode, "blocks", column, groups, add_special)
    if len(as_table(result)) == 0:
        raise DataError(f"{split}: the column {column} has no text to train on.")
    return result


def tokenize(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids without special tokens, at full length; says nothing about what is cut later."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(ids) for ids in encoded]


def get_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(probe) + 1):
        if framed[start : start + len(probe)] == probe:
            return framed[:start], framed[start + len(probe) :]
    return [], []


class TextTask(Task):
    """A task of models that read text alone."""

    def load_parts(self, args: Settings) -> TextParts:
        return load_text_parts(args)


class LanguageModel(TextTask):
    """A task whose rows are blocks of plain text, not examples of the user's."""

    columns: tuple[ColumnRole, ...] = (TEXT,)
    streams = True

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return TokenTally()


def score_blocks(logits: torch.Tensor, labels: torch.Tensor) -> list[Record]:
    """One record per row: summed loss, labelled tokens, correct tokens."""
    from rapidformer.tasks.evaluation.scoring import score_tokens

    losses, counts, hits = score_tokens(logits, labels)
    rows = zip(losses, counts, hits, strict=True)
    return [{"loss": s, "count": n, "by_token": {"accuracy": (right, n)}} for s, n, right in rows]


def describe_block(record: Record) -> dict[str, Any]:
    """The perplexity of a block, if there is nothing to generate or fill in."""
    count = record["count"]
    loss = record["loss"] / count if count else float("nan")
    return {"loss": loss, "perplexity": compute_perplexity(loss), "tokens": count}
