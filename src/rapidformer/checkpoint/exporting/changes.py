"""Count the tensors that training changed: an export that equals its base model is a mistake.

Both sides are compared in the type that is written. Small changes to a 16-bit model may be lost by
rounding, and then the export is the base model although training did change its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rapidformer.checkpoint.exporting.build import Recipes, build_start
from rapidformer.checkpoint.exporting.naming import drop_ties
from rapidformer.checkpoint.exporting.shards import cast
from rapidformer.checkpoint.exporting.source import Source
from rapidformer.checkpoint.frozen import compare_checksums, compute_checksum
from rapidformer.errors import ModelError
from rapidformer.hub import looks_like_path
from rapidformer.models.location import has_weights


@dataclass(frozen=True)
class Changes:
    """How many tensors there are, and how many are not those of the base model."""

    changed: int
    total: int
    base: str

    def describe(self) -> str:
        return f"{self.changed} of {self.total} tensors differ from the base model {self.base}"


def find_missing_start(source: Source) -> str | None:
    """Why there is nothing to compare with; None if there is."""
    if source.start is None:
        return "the run names no model whose weights it started from; --base FOLDER names one"
    start = Path(source.start)
    if not start.exists() and looks_like_path(source.start):
        return f"the base model {start} is no longer there; --base FOLDER names another"
    if source.base is None and start.is_dir() and not has_weights(start):
        return f"{start} has no weights, so the run started from fresh ones"
    return None


def count_changes(recipes: Recipes, source: Source, config: Any, dtype: torch.dtype) -> Changes:
    """Compare tensor by tensor; refuses a base that the adapter was not trained on."""
    start, fresh = build_start(source, config)
    before, after = start.model.state_dict(), recipes.model.state_dict()
    saved = source.run["base"].get("checksums", {}) if source.run and source.base else {}
    saved = {name.replace(".base_layer.", "."): entry for name, entry in saved.items()}
    found: dict[str, list[Any]] = {}
    changed, names = 0, list(drop_ties(recipes.model, after))
    for name in names:
        if name in fresh or name not in before:
            changed += 1
            continue
        old = start.read(before[name])
        kind = getattr(torch, str(saved[name][0]), old.dtype) if name in saved else torch.uint8
        if kind.is_floating_point:  # the packed weights of a quantized base are not comparable
            found[name] = compute_checksum(old.to(kind))
        new = cast(recipes.read(after[name]), dtype)
        changed += old.shape != new.shape or not torch.equal(cast(old, dtype), new)
    compare_checksums(saved, found, source.base)
    return Changes(changed, len(names), str(source.start))


def refuse_unchanged(changes: Changes) -> None:
    """Refuse an export that is silently the base model."""
    if changes.changed == 0:
        raise ModelError(
            f"{changes.describe()}: this export is the base model. Check that the run trained "
            "(steps, learning rate, frozen layers) and, for 16-bit weights, try --dtype fp32; "
            "--allow-unchanged exports it nevertheless."
        )
