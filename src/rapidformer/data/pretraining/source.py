"""A pair of files with the cache of its index maps: what every kind of sample is built from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rapidformer.data.indexed import open_indexed
from rapidformer.data.pretraining.cache import Build, IndexCache, IndexMaps, hash_file
from rapidformer.data.pretraining.split import SplitRange
from rapidformer.errors import DataError


class PretrainingSource:
    """An opened pair of files. Nothing of it but the files' content decides a map's name."""

    def __init__(
        self, prefix: str, data_impl: str, skip_warmup: bool, data_cache_path: str | Path | None
    ) -> None:
        self.data = open_indexed(prefix, data_impl, warmup=not skip_warmup)
        self.cache = IndexCache(Path(self.data.prefix).parent, data_cache_path)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What tells these files from others."""
        prefix = self.data.prefix
        return {
            "idx_sha256": hash_file(Path(f"{prefix}.idx")),
            "idx_bytes": Path(f"{prefix}.idx").stat().st_size,
            "bin_bytes": Path(f"{prefix}.bin").stat().st_size,
        }

    def load_or_build_maps(
        self, objective: str, split: SplitRange, settings: Mapping[str, Any], build: Build
    ) -> IndexMaps:
        """The maps of a split under these settings, from the cache if they are there."""
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


class Recipe(Protocol):
    """How one kind of sample is made; one for each objective."""

    def count_units(self, source: PretrainingSource) -> int:
        """How many things ``--split`` divides: sequences, or documents."""

    def build_dataset(
        self, source: PretrainingSource, split: SplitRange, num_samples: int | None
    ) -> Any:
        """The samples of one split; ``num_samples`` None goes through it once."""
