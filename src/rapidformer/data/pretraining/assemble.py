"""From prefixes to data sets: split or not, blended or not, for any objective.

``--split`` divides *sequences* for GPT (that is, sentences if the data was made with
``--split-sentences``) and *documents* for BERT and T5. An empty split, or one of which zero samples
are wanted, gives None; if ``None`` samples are wanted, the split is used exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from rapidformer.config import Settings
from rapidformer.data.files import hash_file
from rapidformer.data.indexed import open_indexed
from rapidformer.data.pretraining.blend import (
    SPLIT_NAMES,
    BlendedDataset,
    Prefix,
    WeightedPrefix,
    build_blend_index,
    count_for_weight,
    parse_data_prefix,
    parse_split,
    split_bounds,
)
from rapidformer.data.pretraining.cache import IndexCache
from rapidformer.data.pretraining.gpt import GPTDataset, build_gpt_index
from rapidformer.data.pretraining.sentence_map import build_sentence_map
from rapidformer.data.pretraining.sentence_samples import (
    ADDED_BY_BERT,
    ADDED_BY_T5,
    BertDataset,
    BertTokens,
    T5Dataset,
    T5Tokens,
)
from rapidformer.data.tokenizers.build import adopt_hugging_face
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import get_logger, warn

Counts = Sequence[int | None]
Datasets = tuple[Any, Any, Any]
DECODER_LENGTH = 128


def build_datasets(
    objective: str,
    *,
    train_valid_test_num_samples: Counts,
    seq_length: int,
    seed: int,
    data_prefix: Prefix | None = None,
    splits_string: str | None = "969, 30, 1",
    train_data_prefix: Prefix | None = None,
    valid_data_prefix: Prefix | None = None,
    test_data_prefix: Prefix | None = None,
    data_impl: str = "infer",
    skip_warmup: bool = True,
    data_cache_path: str | Path | None = None,
    seq_length_dec: int = DECODER_LENGTH,
    masked_lm_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    binary_head: bool = True,
    tokenizer: Any = None,
    vocab_size: int | None = None,
) -> Datasets:
    """Training, validation and test samples for an objective.

    Give either ``data_prefix``, divided by ``splits_string``, or separate prefixes; each may be a
    single prefix or alternating weights and prefixes. BERT and T5 default to the run's tokenizer;
    GPT needs none, and refuses tokens at or above ``vocab_size`` if that is given.
    """
    counts = train_valid_test_num_samples
    _check_settings(counts, seq_length, seed, masked_lm_prob, short_seq_prob)
    if objective == "gpt":
        make = partial(GPTDataset, seq_length=seq_length, vocab_size=vocab_size)
        recipe = _Recipe("gpt", {"seq_length": seq_length, "seed": seed}, make)
    else:
        recipe = _build_sentence_recipe(
            objective, tokenizer, short_seq_prob, binary_head, seq_length_dec,
            max_seq_length=seq_length, masked_lm_prob=masked_lm_prob, seed=seed,
        )  # fmt: skip

    @cache
    def open_source(prefix: str) -> _Source:
        return _Source(prefix, data_impl, skip_warmup, data_cache_path)

    separate = (train_data_prefix, valid_data_prefix, test_data_prefix)
    if data_prefix is not None and any(separate):
        raise ConfigurationError(
            "--data-path is divided by --split, --train-data-path, --valid-data-path and "
            "--test-data-path are not: give either the one or the others."
        )
    if data_prefix is not None:
        if splits_string is None:
            raise ConfigurationError("--data-path needs --split, such as 969,30,1.")
        parts = [parse_data_prefix(data_prefix)] * 3
        parse_split(splits_string)
    elif any(separate):
        splits_string = None
        parts = [
            parse_data_prefix(prefix, f"--{name}-data-path") if prefix else []
            for name, prefix in zip(SPLIT_NAMES, separate, strict=True)
        ]
    else:
        raise ConfigurationError("there is no data: give --data-path or --train-data-path.")
    train, valid, test = (
        _build_split(recipe, open_source, prefixes, name, count, splits_string)
        for prefixes, name, count in zip(parts, SPLIT_NAMES, counts, strict=True)
    )
    return train, valid, test


def _check_settings(
    counts: Counts, seq_length: int, seed: int, masked_lm_prob: float, short_seq_prob: float
) -> None:
    problems = []
    if len(counts) != 3:
        problems.append(
            f"train_valid_test_num_samples has {len(counts)} numbers, three are needed: for "
            "training, validation and test."
        )
    problems += [f"{count} samples is negative." for count in counts if count and count < 0]
    if seq_length < 1:
        problems.append(f"--seq-length {seq_length} is not a valid length: use 1 or more.")
    if not 0 <= seed < 2**32:
        problems.append(f"--seed {seed} is out of range for sample orders: use 0 to {2**32 - 1}.")
    for flag, value in (("--mask-prob", masked_lm_prob), ("--short-seq-prob", short_seq_prob)):
        if not 0 <= value <= 1:
            problems.append(f"{flag} {value} is not a probability: use 0 to 1.")
    if problems:
        raise ConfigurationError(problems)


@dataclass(frozen=True)
class _Recipe:
    """How the samples of an objective are made."""

    objective: str
    settings: dict[str, Any]
    """What decides the index maps, besides the data and the number of samples."""
    make_dataset: Callable[..., Any]
    """From the data and the maps."""


def _build_sentence_recipe(
    objective: str,
    tokenizer: Any,
    short_seq_prob: float,
    binary_head: bool,
    seq_length_dec: int,
    **options: Any,
) -> _Recipe:
    """BERT's or T5's; ``options`` are what the data sets of both take."""
    if objective not in ("bert", "t5"):
        raise ConfigurationError(f"the objective {objective!r} is not one of gpt, bert and t5.")
    tokenizer = _find_tokenizer(tokenizer)
    make: Callable[..., Any]
    if objective == "bert":
        tokens = BertTokens.of(tokenizer)
        make = partial(BertDataset, tokens=tokens, binary_head=binary_head, **options)
        added, min_sentences = ADDED_BY_BERT, 2 if binary_head else 1
    else:
        options["tokens"] = T5Tokens.of(tokenizer)
        make = partial(T5Dataset, max_seq_length_dec=seq_length_dec, **options)
        added, min_sentences = ADDED_BY_T5, 1
    settings = {
        "max_length": options["max_seq_length"] - added, "short_seq_prob": short_seq_prob,
        "min_sentences": min_sentences, "seed": options["seed"],
    }  # fmt: skip
    return _Recipe(objective, settings, make)


def _find_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, possibly adopted from transformers; if there is none, the run's own."""
    if tokenizer is None:
        from rapidformer.context import get_tokenizer

        return get_tokenizer()
    if hasattr(tokenizer, "get_vocab"):
        return adopt_hugging_face(tokenizer)
    return tokenizer


class _Source:
    """An opened pair of files. Only their content decides the name of a map."""

    def __init__(
        self, prefix: str, data_impl: str, skip_warmup: bool, data_cache_path: str | Path | None
    ) -> None:
        self.data = open_indexed(prefix, data_impl, warmup=not skip_warmup)
        self.cache = IndexCache(Path(self.data.prefix).parent, data_cache_path)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies these files."""
        index, data = Path(f"{self.data.prefix}.idx"), Path(f"{self.data.prefix}.bin")
        return {
            "idx_sha256": hash_file(index),
            "idx_bytes": index.stat().st_size,
            "bin_bytes": data.stat().st_size,
        }

    def find_range(self, objective: str, name: str, splits_string: str | None) -> range:
        """The sequences (GPT) or documents of a split; without a split string, all of them."""
        count = len(self.data) if objective == "gpt" else self.data.num_documents
        if splits_string is None:
            return range(count)
        bounds, place = split_bounds(splits_string, count), SPLIT_NAMES.index(name)
        return range(bounds[place], bounds[place + 1])

    def build_dataset(
        self, recipe: _Recipe, name: str, split: range, num_samples: int | None
    ) -> Any:
        """The samples of a split, with maps from the cache if possible."""

        def build() -> Mapping[str, np.ndarray]:
            options = {"num_samples": num_samples, **recipe.settings}
            if recipe.objective == "gpt":
                return build_gpt_index(self.data.sizes, split.start, split.stop, **options)
            documents = self.data.doc_idx[split.start : split.stop + 1]
            return {"rows": build_sentence_map(documents, self.data.sizes, **options)}

        description = {
            "objective": recipe.objective, "data": self.fingerprint, "start": split.start,
            "stop": split.stop, "num_samples": num_samples, **recipe.settings,
        }  # fmt: skip
        what = f"{recipe.objective} {name} data"
        try:
            maps = self.cache.load_or_build(what, description, build)
        except DataError as error:
            raise DataError(f"{self.data.prefix}, {name}: {error}") from error
        return recipe.make_dataset(self.data, maps)


def _build_split(
    recipe: _Recipe,
    open_source: Callable[[str], _Source],
    parts: list[WeightedPrefix],
    name: str,
    num_samples: int | None,
    splits_string: str | None = None,
) -> Any:
    """The samples of one split of a data set or blend; without a split string, all of it."""
    ranges = [
        open_source(part.prefix).find_range(recipe.objective, name, splits_string) for part in parts
    ]
    used = [(part, split) for part, split in zip(parts, ranges, strict=True) if split]
    if num_samples == 0 or not used:
        return None
    if len(used) < len(parts):
        prefixes = {part.prefix for part, _ in used}
        missing = ", ".join(part.prefix for part in parts if part.prefix not in prefixes)
        warn("%s: %s has no documents in this split and is left out of it.", name, missing)
    if len(parts) == 1:
        dataset = open_source(parts[0].prefix).build_dataset(recipe, name, ranges[0], num_samples)
    elif num_samples is None:
        raise DataError("a blend has no natural end: say how many samples you want.")
    else:
        total = sum(part.weight for part, _ in used)
        weights = [part.weight / total for part, _ in used]
        counts = [count_for_weight(num_samples, weight) for weight in weights]
        datasets = [
            open_source(part.prefix).build_dataset(recipe, name, split, count)
            for (part, split), count in zip(used, counts, strict=True)
        ]
        index = open_source(used[0][0].prefix).cache.load_or_build(
            "blend",
            {"weights": weights, "size": num_samples},
            lambda: build_blend_index(weights, num_samples),
        )
        dataset = BlendedDataset(datasets, index, [part.prefix for part, _ in used])
    get_logger().info("%s data: %d samples", name, len(dataset))
    return dataset


# --- what scripts and the command call ------------------------------------------------------------
# With Megatron's names and order of parameters; keywords after them are ours. Samples are counted
# over the whole run, so data sets repeat their text as often as needed.


class DataOptions(TypedDict, total=False):
    """Data that is split already, instead of ``data_prefix``, and where index maps are kept."""

    train_data_prefix: Prefix | None
    valid_data_prefix: Prefix | None
    test_data_prefix: Prefix | None
    data_cache_path: str | Path | None


def build_pretraining_datasets(
    objective: str,
    args: Settings,
    train_valid_test_num_samples: Counts,
    *,
    tokenizer: Any = None,
    binary_head: bool = True,
    vocab_size: int | None = None,
) -> Datasets:
    """The data of a run's settings as gpt, bert or t5 samples; tokens are below ``vocab_size``."""
    if args.seq_length is None:
        raise ConfigurationError("pre-training data needs --seq-length, the tokens of a sample.")
    return build_datasets(
        objective, data_prefix=args.data_path, train_data_prefix=args.train_data_path,
        valid_data_prefix=args.valid_data_path, test_data_prefix=args.test_data_path,
        data_impl=args.data_impl, splits_string=args.split,
        train_valid_test_num_samples=train_valid_test_num_samples, seq_length=args.seq_length,
        seq_length_dec=args.decoder_seq_length or DECODER_LENGTH, masked_lm_prob=args.mask_prob,
        short_seq_prob=args.short_seq_prob, seed=args.seed, skip_warmup=not args.mmap_warmup,
        data_cache_path=args.data_cache_path, binary_head=binary_head, tokenizer=tokenizer,
        vocab_size=vocab_size,
    )  # fmt: skip


def build_train_valid_test_datasets(
    data_prefix: Prefix | None,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Counts,
    seq_length: int,
    seed: int,
    skip_warmup: bool = True,
    **options: Unpack[DataOptions],
) -> Datasets:
    """GPT samples: ``text``, with ``seq_length + 1`` tokens."""
    return build_datasets(
        "gpt", data_prefix=data_prefix, data_impl=data_impl, splits_string=splits_string,
        train_valid_test_num_samples=train_valid_test_num_samples, seq_length=seq_length, seed=seed,
        skip_warmup=skip_warmup, **options,
    )  # fmt: skip


def build_train_valid_test_datasets_for_huggingface(
    data_prefix: Prefix | None,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Counts,
    max_seq_length: int,
    masked_lm_prob: float,
    short_seq_prob: float,
    seed: int,
    skip_warmup: bool = True,
    binary_head: bool = True,
    *,
    tokenizer: Any = None,
    **options: Unpack[DataOptions],
) -> Datasets:
    """BERT samples for Hugging Face models.

    ``input_ids, attention_mask, token_type_ids, labels`` (-100 where nothing is masked) and, with
    ``binary_head``, ``next_sentence_label`` (1: the two segments are swapped).
    """
    return build_datasets(
        "bert", data_prefix=data_prefix, data_impl=data_impl, splits_string=splits_string,
        train_valid_test_num_samples=train_valid_test_num_samples, seq_length=max_seq_length,
        masked_lm_prob=masked_lm_prob, short_seq_prob=short_seq_prob, seed=seed,
        skip_warmup=skip_warmup, binary_head=binary_head, tokenizer=tokenizer, **options,
    )  # fmt: skip


build_pretrain_huggingface_bert_datasets = build_train_valid_test_datasets_for_huggingface
"""Older name of the same function."""
