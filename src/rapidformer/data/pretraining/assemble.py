"""From prefixes to data sets: split or not, blended or not, for any objective.

An empty split, or one of which zero samples are wanted, gives None; if ``None`` samples are wanted,
the split is used exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rapidformer.data.pretraining import bert, t5
from rapidformer.data.pretraining.blend import (
    BlendedDataset,
    WeightedPrefix,
    build_blend_index,
    count_for_weight,
    parse_data_prefix,
)
from rapidformer.data.pretraining.layout import Layout
from rapidformer.data.pretraining.recipes import (
    BertRecipe,
    GPTRecipe,
    PretrainingSource,
    Recipe,
    T5Recipe,
)
from rapidformer.data.pretraining.split import SPLIT_NAMES, SplitRange, parse_split, split_ranges
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.log import get_logger, warn

Prefix = str | Path | Sequence[str]
Counts = Sequence[int | None]
Datasets = tuple[Any, Any, Any]


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
    seq_length_dec: int | None = None,
    masked_lm_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    binary_head: bool = True,
    tokenizer: Any = None,
    layout: Layout = "huggingface",
    vocab_size: int | None = None,
) -> Datasets:
    """Training, validation and test samples for an objective.

    Give either ``data_prefix``, divided by ``splits_string``, or separate prefixes; each may be a
    single prefix or alternating weights and prefixes. BERT and T5 default to the run's tokenizer;
    GPT needs none, and refuses tokens at or above ``vocab_size`` if that is given. ``layout`` does
    not apply to GPT, whose samples have one form.
    """
    _check_settings(train_valid_test_num_samples, seq_length, seed, masked_lm_prob, short_seq_prob)
    recipe = _build_recipe(
        objective, seq_length=seq_length, seq_length_dec=seq_length_dec, seed=seed,
        masked_lm_prob=masked_lm_prob, short_seq_prob=short_seq_prob, binary_head=binary_head,
        tokenizer=tokenizer, layout=layout, vocab_size=vocab_size,
    )  # fmt: skip
    builder = _Builder(recipe, data_impl, skip_warmup, data_cache_path)
    own = (train_data_prefix, valid_data_prefix, test_data_prefix)
    if data_prefix is not None and any(own):
        raise ConfigurationError(
            "--data-path is divided by --split, --train-data-path, --valid-data-path and "
            "--test-data-path are not: give either the one or the others."
        )
    if data_prefix is not None:
        if splits_string is None:
            raise ConfigurationError("--data-path needs --split, such as 969,30,1.")
        parts = parse_data_prefix(_as_words(data_prefix))
        parse_split(splits_string)
        made = [
            builder.build(parts, name, count, splits_string)
            for name, count in zip(SPLIT_NAMES, train_valid_test_num_samples, strict=True)
        ]
    else:
        if not any(own):
            raise ConfigurationError("there is no data: give --data-path or --train-data-path.")
        made = [
            builder.build(parse_data_prefix(_as_words(given), f"--{name}-data-path"), name, count)
            if given
            else None
            for name, given, count in zip(
                SPLIT_NAMES, own, train_valid_test_num_samples, strict=True
            )
        ]
    return made[0], made[1], made[2]


def _as_words(given: Prefix) -> str | Sequence[str]:
    return str(given) if isinstance(given, Path) else given


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
    for flag, probability in (
        ("--mask-prob", masked_lm_prob),
        ("--short-seq-prob", short_seq_prob),
    ):
        if not 0 <= probability <= 1:
            problems.append(f"{flag} {probability} is not a probability: use 0 to 1.")
    if problems:
        raise ConfigurationError(problems)


def _build_recipe(
    objective: str,
    *,
    seq_length: int,
    seq_length_dec: int | None,
    seed: int,
    masked_lm_prob: float,
    short_seq_prob: float,
    binary_head: bool,
    tokenizer: Any,
    layout: Layout,
    vocab_size: int | None,
) -> Recipe:
    if objective == "gpt":
        return GPTRecipe(seq_length, seed, vocab_size)
    if objective not in ("bert", "t5"):
        raise ConfigurationError(f"the objective {objective!r} is not one of gpt, bert and t5.")
    tokenizer = _find_tokenizer(tokenizer)
    if objective == "bert":
        return BertRecipe(
            seq_length, masked_lm_prob, short_seq_prob, seed, binary_head, layout,
            bert.BertTokens.of(tokenizer, layout),
        )  # fmt: skip
    if seq_length_dec is None:
        raise ConfigurationError("T5's samples need a decoder length: give --decoder-seq-length.")
    return T5Recipe(
        seq_length, seq_length_dec, masked_lm_prob, short_seq_prob, seed, layout,
        t5.T5Tokens.of(tokenizer, layout),
    )  # fmt: skip


def _find_tokenizer(given: Any) -> Any:
    """The given tokenizer, possibly one of transformers; otherwise the run's own."""
    if given is None:
        from rapidformer.context import get_tokenizer

        return get_tokenizer()
    if hasattr(given, "get_vocab"):
        from rapidformer.data.tokenizers.hugging_face import adopt_hugging_face

        return adopt_hugging_face(given)
    return given


class _Builder:
    """Builds one split after another; each pair of files is opened once."""

    def __init__(
        self,
        recipe: Recipe,
        data_impl: str,
        skip_warmup: bool,
        data_cache_path: str | Path | None,
    ) -> None:
        self._recipe = recipe
        self._data_impl = data_impl
        self._skip_warmup = skip_warmup
        self._data_cache_path = data_cache_path
        self._sources: dict[str, PretrainingSource] = {}

    def build(
        self,
        parts: list[WeightedPrefix],
        name: str,
        num_samples: int | None,
        splits_string: str | None = None,
    ) -> Any:
        """The samples of one split of a data set or blend; without a split string, all of it."""
        found = [(part, self._find_range(part.prefix, name, splits_string)) for part in parts]
        if num_samples == 0:
            return None
        used = [(part, split) for part, split in found if split.stop > split.start]
        if len(used) < len(found) and used:
            missing = ", ".join(part.prefix for part, split in found if split.stop == split.start)
            warn("%s: %s has no documents in this split and is left out of it.", name, missing)
        if not used:
            return None
        if len(parts) == 1:
            source = self._open(parts[0].prefix)
            return self._log(name, self._recipe.build_dataset(source, used[0][1], num_samples))
        return self._log(name, self._build_blend(used, num_samples))

    def _build_blend(
        self, used: list[tuple[WeightedPrefix, SplitRange]], num_samples: int | None
    ) -> BlendedDataset:
        if num_samples is None:
            raise DataError("a blend has no natural end: say how many samples you want.")
        total = sum(part.weight for part, _ in used)
        weights = [part.weight / total for part, _ in used]
        datasets = [
            self._recipe.build_dataset(
                self._open(part.prefix), split, count_for_weight(num_samples, weight)
            )
            for (part, split), weight in zip(used, weights, strict=True)
        ]
        cache = self._open(used[0][0].prefix).cache
        description = {"weights": weights, "size": num_samples}
        index = cache.load_or_build(
            "blend", description, lambda: build_blend_index(weights, num_samples)
        )
        return BlendedDataset(datasets, index, [part.prefix for part, _ in used])

    def _find_range(self, prefix: str, name: str, splits_string: str | None) -> SplitRange:
        count = self._recipe.count_units(self._open(prefix))
        if splits_string is None:
            return SplitRange(name, 0, count)
        return split_ranges(splits_string, count)[SPLIT_NAMES.index(name)]

    def _open(self, prefix: str) -> PretrainingSource:
        if prefix not in self._sources:
            self._sources[prefix] = PretrainingSource(
                prefix, self._data_impl, self._skip_warmup, self._data_cache_path
            )
        return self._sources[prefix]

    def _log(self, name: str, dataset: Any) -> Any:
        get_logger().info("%s data: %d samples", name, len(dataset))
        return dataset
