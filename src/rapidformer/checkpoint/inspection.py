"""Verify checkpoints, exported models and adapters: for ``rapidformer check``, in sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rapidformer.checkpoint.finding import RUN, STATE_INDEX, read_run
from rapidformer.checkpoint.index import Index, find_index_problems, read_index
from rapidformer.checkpoint.publish import MANIFEST, find_damage, read_json, read_manifest
from rapidformer.checkpoint.tensors import StoredTensors, check_counter, read_saved_shapes
from rapidformer.errors import CheckpointError
from rapidformer.strict_json import parse_json

Advance = Callable[[int], None]
"""Called with the number of bytes that were read."""
_LIKE_WEIGHTS = (
    "exp_avg", "exp_avg_sq", "momentum_buffer", "exp_avg_codes", "exp_avg_sq_codes",
)  # fmt: skip
"""What an optimizer keeps in the shape of its weights."""


def inspect_checkpoint(folder: Path, advance: Advance, *, finite: bool) -> Iterator[str]:
    """Everything that is wrong with a checkpoint."""
    yield from find_damage(folder, (RUN, STATE_INDEX), advance=advance)
    try:
        run, index = read_run(folder), read_index(folder / "state")
        found = find_index_problems(index, folder / "state")
        problems = [f"{STATE_INDEX}: {text}" for text in found]
        yield from problems
        yield from _find_unlisted(folder, run, index)
        if problems:
            return
        yield from _compare_shapes(run, read_saved_shapes(folder))
        check_counter(folder)
        if finite:
            yield from _find_not_finite(folder, run)
    except CheckpointError as reason:
        yield str(reason).removesuffix(".")


def inspect_model(folder: Path, advance: Advance, *, finite: bool) -> Iterator[str]:
    """What is wrong with an exported model or adapter: by its manifest, or the files' headers."""
    if has_hashes(folder):
        yield from find_damage(folder, advance=advance)
    names: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            yield f"{path.name} is not a regular file"
            continue
        try:
            with safe_open(path, framework="pt") as file:
                names[path.name] = list(file.keys())
                for name in names[path.name] if finite else ():
                    yield from _judge(name, file.get_tensor(name))
        except (SafetensorError, OSError) as reason:
            yield f"{path.name} cannot be read: {reason}"
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".safetensors.index.json"):
            yield from _compare_weight_map(path, names)
            continue
        try:
            if path.is_file():  # a named pipe is not: reading it would never end
                parse_json(path.read_bytes())
        except OSError as reason:
            yield f"{path.name} cannot be read: {reason.strerror}"
        except ValueError as reason:
            yield f"{path.name} is not valid JSON ({reason})"


def has_hashes(folder: Path) -> bool:
    """Whether a folder has a manifest of ours; other programs have files of that name too."""
    return bool(_list_manifest(folder))


def _list_manifest(folder: Path) -> set[str] | None:
    try:
        return set(read_manifest(folder))
    except CheckpointError:
        return None


def list_unlisted(folder: Path) -> list[str]:
    """Files that cannot be verified, since the manifest does not list them."""
    listed = _list_manifest(folder)
    if listed is None:
        return []
    names = (str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
    return sorted(name for name in names if name not in {*listed, MANIFEST})


def _find_unlisted(folder: Path, run: dict[str, Any], index: Index) -> Iterator[str]:
    """Files that loading reads must be in the manifest, or nobody would notice a change."""
    listed = _list_manifest(folder)
    if listed is None:
        return
    needed = {f"state/{part.file}" for entry in index.values() for part in entry.parts}
    needed = {name.removeprefix("state/../") for name in needed}
    needed.add(STATE_INDEX)
    sizes = run.get("layout")
    if isinstance(sizes, dict) and any(name.startswith("random-") for name in listed):
        ranks = prod(size for size in sizes.values() if isinstance(size, int))
        needed |= {f"random-{rank:05d}.json" for rank in range(min(ranks, 1_000_000))}
    for name in sorted(needed - listed):
        yield f"its {MANIFEST} does not list {name}"


def _compare_shapes(run: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """The optimizer's parameters are tensors of the model, and its state has their shapes."""
    for name in _list_trained(run):
        if f"model.{name}" not in shapes:
            yield f"the optimizer trains {name}, which is not among the tensors"
    for name, shape in shapes.items():
        weight, _, key = name.removeprefix("optimizer.").rpartition(".")
        wanted = shapes.get(f"model.{weight}")
        if name.startswith("optimizer.") and key in _LIKE_WEIGHTS:
            if wanted is None:
                yield f"{name} belongs to no tensor of the model"
            elif wanted != shape:
                yield f"{name} has shape {list(shape)}, the weight has {list(wanted)}"


def _list_trained(run: dict[str, Any]) -> list[str]:
    groups = [group for group in run["param_groups"] or () if isinstance(group, dict)]
    lists = [group.get("params") for group in groups]
    return [str(name) for names in lists if isinstance(names, list) for name in names]


def _find_not_finite(folder: Path, run: dict[str, Any]) -> Iterator[str]:
    """Only what is trained: some frozen weights hold an infinity on purpose."""
    trained = {f"model.{name}" for name in _list_trained(run)}
    stored = StoredTensors(folder / "state")
    for name, (_, dtype) in stored.kinds.items():
        is_frozen = trained and name.startswith("model.") and name not in trained
        if dtype.is_floating_point and not is_frozen:
            yield from _judge(name, stored.read(name))


def _judge(name: str, tensor: Tensor) -> Iterator[str]:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        count = int((~tensor.isfinite()).sum())
        yield f"{name} has {count:,} of {tensor.numel():,} values that are NaN or infinite"


def _compare_weight_map(path: Path, names: dict[str, list[str]]) -> Iterator[str]:
    try:
        places = read_json(path)["weight_map"].items()
    except (CheckpointError, KeyError, AttributeError):
        yield f"{path.name} is missing or unreadable"
        return
    for name, file in places:
        if not isinstance(file, str) or file not in names:
            yield f"{path.name} says that {name} is in {json.dumps(file)}, which is not readable"
        elif name not in names[file]:
            yield f"{path.name} says that {name} is in {file}, but it is not"
