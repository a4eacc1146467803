"""From whatever the user points at to named splits of rows.

A Hub name, files, a folder, an image folder or a `save_to_disk` folder becomes a dictionary with
the keys train, validation and test. This file decides which of these was meant; `folders.py` and
`files.py` read local data.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.compat.patches import Entry, Patch
from rapidformer.config import Settings
from rapidformer.data.files import get_first_line, get_format, import_datasets
from rapidformer.data.folders import (
    get_split_name,
    load_folder,
    load_named_files,
    load_split,
    name_splits,
)
from rapidformer.errors import DataError
from rapidformer.hub import describe_absence, is_hub_reachable, looks_like_path, suggest_path
from rapidformer.log import warn_once
from rapidformer.nearest import suggest

if TYPE_CHECKING:
    from datasets import Dataset

    from rapidformer.data.streams.shards import Shard

SPLITS_BY_FLAG = {"train_data": "train", "valid_data": "validation", "test_data": "test"}


def load_splits(args: Settings, *, may_stream: bool = True) -> dict[str, Any]:
    """The splits that the data flags name, with keys among train, validation and test.

    With ``--streaming``, the training split is a stream, unless it ``may`` not be one.
    """
    if args.streaming:
        return _load_streams(args, may_stream=may_stream)
    location = as_list(args.data_path or args.data_dir)
    splits = _load_location(location, args) if location else {}
    for name, split in SPLITS_BY_FLAG.items():
        paths = [check_exists(path, name) for path in as_list(getattr(args, name))]
        if paths:
            splits[split] = load_split(paths, args.cache_dir)
    _check_given(splits)
    fraction = getattr(args, "validation_split", None)
    return hold_out(splits, fraction, args.seed) if fraction else splits


def _check_given(splits: dict[str, Any]) -> None:
    if not splits:
        raise DataError(
            "No data was given: point --data-path at a file, a folder or a data set on the Hub "
            "(with --data-name where it has several), or give --train-data and --valid-data."
        )


def _load_streams(args: Settings, *, may_stream: bool) -> dict[str, Any]:
    from rapidformer.data.streams.listing import build_shards, choose_buffer, expand, load_table
    from rapidformer.data.streams.stream import StreamRows

    sets: dict[str, list[list[Shard]]] = {}
    for text in as_list(args.data_path or args.data_dir):
        for split, shards in _find_shards(text, args).items():
            sets.setdefault(split, []).append(shards)
    for name, split in SPLITS_BY_FLAG.items():
        if texts := as_list(getattr(args, name)):
            sets[split] = [build_shards(expand(text, name)) for text in texts]
    _check_given(sets)
    splits: dict[str, Any] = {}
    for split, groups in sets.items():
        shards = [shard for group in groups for shard in group]
        if split != "train" or not may_stream:
            limit = args.max_predict_samples if split == "test" else args.max_eval_samples
            splits[split] = load_table(shards, limit)
        else:
            splits[split] = StreamRows(shards, buffer=choose_buffer(args))
    return splits


def _find_shards(text: str, args: Settings) -> dict[str, list[Shard]]:
    """The shards of each split that a path, a pattern or a name on the Hub has."""
    from rapidformer.data.streams.listing import build_shards, expand, list_shards_of, split_files

    if not has_magic(text) and is_hub_name(text):
        found = _load_from_hub(text, args)
        return {split: list_shards_of(rows, f"{text} ({split})") for split, rows in found.items()}
    path = Path(text).expanduser()
    folder = find_sub_folder(path, args.data_name) if path.is_dir() else text
    files = split_files(expand(str(folder), "data_path"))
    return {split: build_shards(paths) for split, paths in files.items()}


def hold_out(splits: dict[str, Dataset], fraction: float, seed: int) -> dict[str, Dataset]:
    """Take validation rows from the training rows: the same ones for the same seed."""
    if "validation" in splits or "train" not in splits:
        warn_once(f"--validation-split {fraction} has no effect: the data has a validation split.")
        return splits
    rows = splits["train"]
    if len(rows) < 2:
        raise DataError(f"--validation-split {fraction}: the data has one row, and two are needed.")
    count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
    held = sorted(random.Random(seed).sample(range(len(rows)), count))
    chosen = set(held)
    rest = [number for number in range(len(rows)) if number not in chosen]
    return {**splits, "train": rows.select(rest), "validation": rows.select(held)}


def as_list(paths: str | Path | Sequence[str | Path] | None) -> list[str]:
    """One path or several: flags and users' own code may give either."""
    if not paths:
        return []
    return [str(paths)] if isinstance(paths, (str, Path)) else [str(path) for path in paths]


def _load_location(location: list[str], args: Settings) -> dict[str, Dataset]:
    if len(location) == 1:
        return load_location(location[0], args)
    paths = [check_exists(item, "data_path") for item in location]
    folders = [path for path in paths if path.is_dir()]
    if folders:
        raise DataError(
            f"--data-path names the folder {folders[0]} and other paths: give one folder, or "
            "several files."
        )
    return load_named_files(paths, args.cache_dir)


def load_location(text: str, args: Settings, split: str | None = None) -> dict[str, Dataset]:
    """The splits of a file, a folder or a Hub name; ``split`` is the one to train on."""
    if is_hub_name(text):
        return _load_from_hub(text, args, split)
    path = check_exists(text, "data_path")
    if path.is_dir():
        splits = load_folder(find_sub_folder(path, args.data_name), args.cache_dir)
        return splits if split is None else _choose_split(splits, split, text)
    return load_named_files([path], args.cache_dir)


def _choose_split(data: Mapping[str, Dataset], split: str, source: str) -> dict[str, Dataset]:
    """Train on this split; others keep their meaning."""
    if split not in data:
        hint = suggest(split, list(data))
        raise DataError(f"{source} has no split {split}, only {', '.join(data)}.{hint}")
    others = {name: rows for name, rows in data.items() if name != split and get_split_name(name)}
    named = name_splits(others, source) if others else {}
    return {**named, "train": data[split]}


def is_hub_name(text: str) -> bool:
    """Whether this can only be a data set on the Hub: nothing here has that name."""
    path = Path(text).expanduser()
    return not (path.exists() or looks_like_path(text) or get_format(path))


def check_exists(text: str, setting: str) -> Path:
    """The path that a flag names, which must be there."""
    path = Path(text).expanduser()
    if path.exists():
        return path
    flag = "--" + setting.replace("_", "-")
    if not path.parent.is_dir():
        raise DataError(f"{flag} {text}: no such file or folder (nor a folder {path.parent}).")
    raise DataError(f"{flag} {text}: no such file or folder.{suggest_path(path)}")


def find_sub_folder(folder: Path, name: str | None) -> Path:
    """The part of a folder that ``--data-name`` chooses."""
    if name is None:
        return folder
    if (folder / name).is_dir():
        return folder / name
    children = sorted(child.name for child in folder.iterdir() if child.is_dir())
    # A name that only selects the metric (a local folder with MRPC's files and --data-name mrpc).
    if not children or any(get_split_name(child) for child in children):
        return folder
    if any(get_format(child) for child in folder.iterdir()):
        return folder
    raise DataError(
        f"--data-name {name}: {folder} has no such sub-folder; it has {', '.join(children)}."
    )


def _load_from_hub(name: str, args: Settings, split: str | None = None) -> dict[str, Any]:
    datasets = import_datasets()
    full_name = f"{name} ({args.data_name})" if args.data_name else name
    online = is_hub_reachable("HF_DATASETS_OFFLINE")
    try:
        with contextlib.nullcontext() if online else _OFFLINE:
            data = datasets.load_dataset(
                name, args.data_name, cache_dir=args.cache_dir, streaming=args.streaming
            )
    except Exception as error:
        text = _describe_hub_failure(full_name, name, args.data_name, error, online)
        raise DataError(text) from error
    data = data if isinstance(data, dict) else {"train": data}
    return name_splits(data, full_name) if split is None else _choose_split(data, split, full_name)


def _describe_hub_failure(
    full_name: str, name: str, data_name: str | None, error: Exception, online: bool
) -> str:
    configurations = re.findall(r"'([^']+)'", str(error).partition("[")[2])
    if isinstance(error, ValueError) and configurations:
        parts = ", ".join(configurations)
        if data_name is None:
            return f"The data set {name} has several parts: choose one with --data-name: {parts}"
        hint = suggest(data_name, configurations)
        return f"The data set {name} has no part {data_name}: {parts}.{hint}"
    is_unknown = type(error).__name__ in ("DatasetNotFoundError", "FileNotFoundError")
    if is_unknown or not online:
        what = f"data set {full_name}"
        return describe_absence(what, name, "--data-path", is_reachable=online)
    return f"The data set {full_name} cannot be loaded: {get_first_line(error)}"


def _list_switches() -> list[Entry]:
    import datasets.config
    import huggingface_hub.constants

    modules = (datasets.config, huggingface_hub.constants)
    return [Entry(module, "HF_HUB_OFFLINE", lambda _: True) for module in modules]


_OFFLINE = Patch(_list_switches)
"""Makes `datasets` use only its cache instead of retrying an unreachable Hub."""
