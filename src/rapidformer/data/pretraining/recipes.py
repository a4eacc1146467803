"""GPT, BERT and T5: what is split, which maps are built, and what reads them.

``--split`` divides *sequences* for GPT (that is, sentences if the data was made with
``--split-sentences``) and *documents* for BERT and T5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer.data.indexed import open_indexed
from rapidformer.data.pretraining import bert, t5
from rapidformer.data.pretraining.cache import Build, IndexCache, IndexMaps, hash_file
from rapidformer.data.pretraining.gpt import GPTDataset
from rapidformer.data.pretraining.gpt_index import build_gpt_index
from rapidformer.data.pretraining.layout import Layout
from rapidformer.data.pretraining.sentence_map import build_sentence_map
from rapidformer.data.pretraining.split import SplitRange
from rapidformer.errors import DataError


class PretrainingSource:
    """An opened pair of files. Only the content of the files decides a map's name."""

    def __init__(
        self, prefix: str, data_impl: str, skip_warmup: bool, data_cache_path: str | Path | None
    ) -> None:
        self.data = open_indexed(prefix, data_impl, warmup=not skip_warmup)
        self.cache = IndexCache(Path(self.data.prefix).parent, data_cache_path)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies these files."""
        prefix = self.data.prefix
        return {
            "idx_sha256": hash_file(Path(f"{prefix}.idx")),
            "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
            "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        }

    def load_or_build_maps(
        self, objective: str, split: SplitRange, settings: Mapping[str, Any], build: Build
    ) -> IndexMaps:
        """The maps of a split under these settings, from the cache if possible."""
        description = {
            "objective": objective,
            "data": self.fingerprint,
            "start": split.start,
            "stop": split.stop,
            **settings,
        }
        try:
            return self.cache.load_or_build(f"{objective} {split.name} data", description, build)
        except DataError as error:
            raise DataError(f"{self.data.prefix}, {split.name}: {error}") from error


@dataclass(frozen=True)
class GPTRecipe:
    """``seq_length + 1`` consecutive tokens."""

    seq_length: int
    seed: int
    vocab_size: int | None = None

    def count_units(self, source: PretrainingSource) -> int:
        """The number of items that ``--split`` divides."""
        return len(source.data)

    def build_dataset(
        self, source: PretrainingSource, split: SplitRange, num_samples: int | None
    ) -> GPTDataset:
        """The samples of one split; ``num_samples`` None uses it exactly once."""
        settings = {"seq_length": self.seq_length, "num_samples": num_samples, "seed": self.seed}

        def build() -> Mapping[str, np.ndarray]:
            return build_gpt_index(
                source.data.sizes,
                start=split.start,
                stop=split.stop,
                num_samples=num_samples,
                seq_length=self.seq_length,
                seed=self.seed,
            )._asdict()

        maps = source.load_or_build_maps("gpt", split, settings, build)
        return GPTDataset(source.data, maps, seq_length=self.seq_length, vocab_size=self.vocab_size)


@dataclass(frozen=True)
class BertRecipe:
    """A pair of text segments with masked words."""

    max_seq_length: int
    masked_lm_prob: float
    short_seq_prob: float
    seed: int
    binary_head: bool
    layout: Layout
    tokens: bert.BertTokens

    def count_units(self, source: PretrainingSource) -> int:
        return source.data.num_documents

    def build_dataset(
        self, source: PretrainingSource, split: SplitRange, num_samples: int | None
    ) -> bert.BertDataset:
        maps = _load_or_build_sentence_map(
            "bert",
            source,
            split,
            num_samples,
            max_length=self.max_seq_length - bert.ADDED_TOKENS,
            short_seq_prob=self.short_seq_prob,
            min_sentences=2 if self.binary_head else 1,
            seed=self.seed,
        )
        return bert.BertDataset(
            source.data,
            maps,
            self.tokens,
            max_seq_length=self.max_seq_length,
            masked_lm_prob=self.masked_lm_prob,
            seed=self.seed,
            binary_head=self.binary_head,
            layout=self.layout,
        )


@dataclass(frozen=True)
class T5Recipe:
    """Text with spans removed, and the spans."""

    max_seq_length: int
    max_seq_length_dec: int
    masked_lm_prob: float
    short_seq_prob: float
    seed: int
    layout: Layout
    tokens: t5.T5Tokens

    def count_units(self, source: PretrainingSource) -> int:
        return source.data.num_documents

    def build_dataset(
        self, source: PretrainingSource, split: SplitRange, num_samples: int | None
    ) -> t5.T5Dataset:
        maps = _load_or_build_sentence_map(
            "t5",
            source,
            split,
            num_samples,
            max_length=self.max_seq_length - t5.ADDED_TOKENS,
            short_seq_prob=self.short_seq_prob,
            min_sentences=1,
            seed=self.seed,
        )
        return t5.T5Dataset(
            source.data,
            maps,
            self.tokens,
            max_seq_length=self.max_seq_length,
            max_seq_length_dec=self.max_seq_length_dec,
            masked_lm_prob=self.masked_lm_prob,
            seed=self.seed,
            layout=self.layout,
        )


Recipe = GPTRecipe | BertRecipe | T5Recipe


def _load_or_build_sentence_map(
    objective: str,
    source: PretrainingSource,
    split: SplitRange,
    num_samples: int | None,
    *,
    max_length: int,
    short_seq_prob: float,
    min_sentences: int,
    seed: int,
) -> Mapping[str, np.ndarray]:
    settings = {
        "num_samples": num_samples,
        "max_length": max_length,
        "short_seq_prob": short_seq_prob,
        "min_sentences": min_sentences,
        "seed": seed,
    }

    def build() -> Mapping[str, np.ndarray]:
        rows = build_sentence_map(
            source.data.doc_idx[split.start : split.stop + 1],
            source.data.sizes,
            max_num_samples=num_samples,
            max_length=max_length,
            short_seq_prob=short_seq_prob,
            min_sentences=min_sentences,
            seed=seed,
        )
        return {"rows": rows}

    return source.load_or_build_maps(objective, split, settings, build)
