"""Several data sets in one run, as the user names them: on the command line or in a YAML list.

`--data-path a.jsonl b.jsonl#1000 org/name:split` has sets if weights, a cap, a split, a folder or a
Hub name say so; plain files alone are one data set, as they always were. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.data.folders import load_split
from rapidformer.data.sources import (
    as_list,
    check_exists,
    hold_out,
    is_hub_name,
    load_location,
    load_splits,
)
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.nearest import suggest

if TYPE_CHECKING:
    from datasets import Dataset

_KEYS = ("path", "name", "split", "columns", "template", "weight", "cap")
_YAML = (".yaml", ".yml")
_SPLIT = re.compile(r":[\w.-]+$")
_COLUMNS = tuple(name for name in vars(Settings()) if name.endswith(("_column", "_columns")))


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """One data set of several."""

    label: str = ""
    """Its name in log lines and metrics."""
    path: str
    name: str | None = None
    split: str | None = None
    """The split that is trained on, if not the one named train."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Settings such as ``text_column``, for this set alone."""
    template: str | None = None
    weight: float | None = None
    cap: int | None = None
    """The first so many training rows are used."""

    def apply(self, args: Settings) -> Settings:
        """The settings of a run on this set alone."""
        own: dict[str, Any] = {
            "data_path": self.path, "data_dir": None, "data_weights": None, "valid_data": None,
            "test_data": None, **self.columns,
        }  # fmt: skip
        if self.name is not None:
            own["data_name"] = self.name
        if self.template is not None:
            own["chat_template"] = self.template
        return args.replace(f"the data set {self.label}", **own)


def read_sets(args: Settings) -> list[NamedSet]:
    """The sets of a run, none if its data is a single one; reports every problem at once."""
    problems: list[str] = []
    location = as_list(args.data_path)
    file = location[0] if len(location) == 1 and location[0].endswith(_YAML) else None
    if file is not None:
        sets = _read_file(file, problems)
    else:
        sets = [_read_item(text, problems) for text in location]
    weights = args.data_weights
    paths = [item.path for item in sets]
    is_file = (not Path(p).expanduser().is_dir() and not is_hub_name(p) for p in paths)
    is_plain = len(location) == 1 or all(is_file)
    is_single = is_plain and not any(item.cap or item.split for item in sets)
    if file is None and weights is None and is_single and not problems:
        return []
    problems += _check_weights(sets, weights, file)
    problems += _check_settings(args, sets)
    has_weights = weights is not None or any(item.weight is not None for item in sets)
    if args.streaming and any(item.cap or item.split for item in sets):
        problems.append(
            "--streaming: caps (#1000) and splits (:train) of a set need rows that can be counted. "
            "Leave them out, or --streaming."
        )
    if args.streaming and file is not None and not has_weights:
        problems.append(f"--streaming: {file} has no weights: give one to every set.")
    if problems:
        raise ConfigurationError(problems)
    if args.streaming and not has_weights:  # one stream with the shards of all
        return []
    if weights is not None:
        sets = [replace(item, weight=w) for item, w in zip(sets, weights, strict=True)]
    return _label(sets)


def load_set(item: NamedSet, number: int, args: Settings) -> dict[str, Any]:
    """The splits of a set; ``args`` are the run's."""
    own, path = item.apply(args), Path(item.path).expanduser()
    if args.streaming:
        return _load_stream(item, number, own, args)
    if path.is_file():
        # Whatever its name says: it was named as something to train on.
        splits: dict[str, Dataset] = {"train": load_split([path], args.cache_dir)}
    else:
        splits = load_location(item.path, own, item.split)
    for setting, split in (("valid_data", "validation"), ("test_data", "test")):
        if files := as_list(getattr(args, setting)):
            splits[split] = load_split([check_exists(files[number], setting)], args.cache_dir)
    if "train" not in splits:
        raise DataError(f"{item.label}: the data has no training split, only {', '.join(splits)}.")
    if item.cap is not None:
        splits["train"] = splits["train"].select(range(min(item.cap, len(splits["train"]))))
    return hold_out(splits, args.validation_split, args.seed) if args.validation_split else splits


def _load_stream(item: NamedSet, number: int, own: Settings, args: Settings) -> dict[str, Any]:
    given = {s: as_list(getattr(args, s)) for s in ("valid_data", "test_data")}
    chosen: dict[str, Any] = {name: files[number] for name, files in given.items() if files}
    if Path(item.path).expanduser().is_file():
        chosen |= {"data_path": None, "train_data": item.path}
    return load_splits(own.replace(f"the data set {item.label}", **chosen))


def _read_item(text: str, problems: list[str]) -> NamedSet:
    """``path``, ``path#cap``, ``path:split`` or both."""
    path, cap, split = text, None, None
    if "#" in text and not Path(text).expanduser().exists():
        path, _, number = text.rpartition("#")
        cap = _read_cap(number, f"--data-path {text}", problems)
    if _SPLIT.search(path) and not Path(path).expanduser().exists():
        path, _, split = path.rpartition(":")
    return NamedSet(path=path, cap=cap, split=split)


def _read_cap(value: Any, where: str, problems: list[str]) -> int | None:
    is_number = not isinstance(value, bool) and str(value).isdecimal()
    if is_number and int(value) > 0:
        return int(value)
    problems.append(f"{where}: a cap is a number of rows from 1 up, got {value!r}.")
    return None


def _read_file(text: str, problems: list[str]) -> list[NamedSet]:
    import yaml

    path = check_exists(text, "data_path")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).replace("\n", " ")
        raise ConfigurationError(f"--data-path {text} is not valid YAML: {reason}") from None
    if not isinstance(entries, list) or not entries:
        problems.append(f"--data-path {text} must be a list of data sets, each with a path.")
        return []
    sets = []
    for number, entry in enumerate(entries, start=1):
        entry = {"path": entry} if isinstance(entry, str) else entry
        where = f"{text}, set {number}"
        found = _find_entry_problems(entry, where)
        problems += found
        if not found:
            sets.append(_read_entry(entry, path.parent, where, problems))
    return sets


def _find_entry_problems(entry: Any, where: str) -> list[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        return [f"{where}: give the path of a file, a folder or a data set on the Hub."]
    problems = [
        f"{where}: the key {key} is unknown: use {', '.join(_KEYS)}.{suggest(str(key), _KEYS)}"
        for key in entry
        if key not in _KEYS
    ]
    problems += [
        f"{where}: {key} must be text, got {entry[key]!r}."
        for key in ("name", "split", "template")
        if entry.get(key) is not None and not isinstance(entry[key], str)
    ]
    columns = entry.get("columns") or {}
    if not isinstance(columns, dict):
        return [*problems, f"{where}: columns must be pairs such as `text: body`, got {columns!r}."]
    known = [name.rpartition("_")[0] for name in _COLUMNS]
    problems += [
        f"{where}: no column has the role {role}: use {', '.join(known)}.{suggest(role, known)}"
        for role in map(str, columns)
        if _find_setting(role) is None
    ]
    return problems


def _read_entry(
    entry: Mapping[str, Any], folder: Path, where: str, problems: list[str]
) -> NamedSet:
    columns = {str(_find_setting(str(k))): v for k, v in (entry.get("columns") or {}).items()}
    weight = entry.get("weight")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, (int, float))):
        problems.append(f"{where}: weight must be a number, got {weight!r}.")
        weight = None
    item = _read_item(entry["path"], problems)
    if entry.get("cap") is not None:
        item = replace(item, cap=_read_cap(entry["cap"], where, problems))
    beside = folder / item.path
    return replace(
        item, path=str(beside) if beside.exists() and not Path(item.path).exists() else item.path,
        name=entry.get("name"), split=entry.get("split") or item.split, columns=columns,
        template=entry.get("template"), weight=weight,
    )  # fmt: skip


def _find_setting(role: str) -> str | None:
    return next((name for name in _COLUMNS if role in (name, name.rpartition("_")[0])), None)


def _check_weights(
    sets: Sequence[NamedSet], given: Sequence[float] | None, file: str | None
) -> Iterator[str]:
    weights: list[float | None] = [item.weight for item in sets]
    if given is not None and file is not None:
        yield f"--data-weights: the weights of {file} belong into the file."
        return
    if given is not None:
        weights = list(given)
        if len(weights) != len(sets):
            yield (
                f"--data-weights has {len(weights)} numbers for the {len(sets)} data sets of "
                "--data-path: give one for each."
            )
    missing = [number for number, weight in enumerate(weights, start=1) if weight is None]
    if missing and len(missing) < len(weights):
        yield f"{file}: set {missing[0]} has no weight: give one to every set, or to none."
    for weight in weights:
        if weight is not None and not (math.isfinite(weight) and weight > 0):
            yield f"the weight {weight:g} of a data set must be a number above 0."


def _check_settings(args: Settings, sets: Sequence[NamedSet]) -> Iterator[str]:
    if args.train_data:
        yield "--train-data and a mixture in --data-path exclude each other: give only one of them."
    for setting in ("valid_data", "test_data"):
        flag, files = "--" + setting.replace("_", "-"), as_list(getattr(args, setting))
        for file in files:
            if not Path(file).expanduser().exists():
                yield f"{flag} {file}: no such file or folder."
        if (count := len(files)) and sets and count != len(sets):
            yield (
                f"{flag} has {count} files for {len(sets)} data sets: give one for each, in their "
                "order, or hold rows out of each with --validation-split."
            )
    if args.data_weights or any(item.weight for item in sets):
        if args.group_by_length:
            yield "--group-by-length orders all rows by itself: leave it out, or the weights."
        if args.updates_per_generation > 1:
            yield "--updates-per-generation above 1 repeats batches: leave it out, or the weights."


def _label(sets: Sequence[NamedSet]) -> list[NamedSet]:
    """Short names, each once, that fit into the name of a metric."""
    labels: list[str] = []
    for item in sets:
        stem = Path(item.path).name.split(".")[0] or "data"
        text = "_".join(part for part in (stem, item.name, item.split) if part)
        text = re.sub(r"[^\w.-]+", "_", text)
        same = sum(
            re.fullmatch(re.escape(text) + r"(_\d+)?", label) is not None for label in labels
        )
        labels.append(f"{text}_{same + 1}" if same else text)
    return [replace(item, label=label) for item, label in zip(sets, labels, strict=True)]
