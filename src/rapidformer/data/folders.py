"""From a folder of data to named splits: files by name, sub-folders, images, `save_to_disk`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.data.files import (
    check_not_empty,
    get_first_line,
    get_format,
    import_datasets,
    load_file,
)
from rapidformer.errors import DataError
from rapidformer.hub import describe_content
from rapidformer.log import get_logger, warn

if TYPE_CHECKING:
    from datasets import Dataset

_MEDIA_ENDINGS = {
    "image": {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"},
    "audio": {".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".w64"},
}
# Data folders often contain these side files, which are JSON but hold no rows.
_SIDE_FILES = {"dataset_info.json", "dataset_infos.json", "state.json", "config.json"}
_SPLIT_WORDS = {
    "train": "train", "training": "train", "valid": "validation", "validation": "validation",
    "val": "validation", "dev": "validation", "eval": "validation", "test": "test",
    "predict": "test", "prediction": "test",
}  # fmt: skip


def get_split_name(name: str) -> str | None:
    """Train, validation or test for a name; of GLUE's two validation sets, the matched one."""
    words = re.split(r"[^a-z]+", name.lower())
    if "mismatched" in words:
        return None
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def name_splits(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Any mapping of splits under our three names; if several match, the first is kept."""
    splits: dict[str, Any] = {}
    left_out: list[str] = []
    for name, rows in data.items():
        split = get_split_name(name)
        if split is None or split in splits:
            left_out.append(name)
        else:
            splits[split] = check_not_empty(rows, f"{source} ({name})")
    if not splits and len(data) == 1:
        splits["train"] = next(iter(data.values()))
    elif left_out:
        get_logger().info("%s: the splits %s are not used.", source, ", ".join(left_out))
    if not splits:
        raise DataError(
            f"{source} has the splits {', '.join(data)}: none of them is named train, "
            "validation or test. Give files with --train-data and --valid-data."
        )
    return splits


def load_folder(folder: Path, cache_dir: str | None) -> dict[str, Dataset]:
    """The splits of a folder, in any of the layouts people use."""
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _load_saved(folder)
    files = list_data_files(folder)
    if files:
        return load_named_files(files, cache_dir)
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    by_split = {split: path for path in folders if (split := get_split_name(path.name))}
    if by_split:
        return {split: _load_split_folder(path, cache_dir) for split, path in by_split.items()}
    if kind := _find_media(folder):
        return {"train": _load_class_folders(folder, kind, None)}
    raise DataError(describe_no_data(folder))


def describe_no_data(folder: Path) -> str:
    """What a folder of data holds, and what it has instead."""
    return (
        f"{folder} holds no data files: expected json, jsonl, csv, tsv, parquet, arrow or txt "
        "files named train..., valid... or test..., folders of images or audio, or a folder "
        f"written by save_to_disk; it holds {describe_content(folder)}."
    )


def load_named_files(files: Sequence[Path], cache_dir: str | None) -> dict[str, Dataset]:
    """Files to splits by name; if no name mentions a split, all of them are training data."""
    by_split: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for path in files:
        split = get_split_name(path.name.split(".")[0])
        if split is None:
            unnamed.append(path)
        else:
            by_split.setdefault(split, []).append(path)
    if unnamed and by_split:
        names = ", ".join(path.name for path in unnamed)
        warn("%s: no split in the name, so not used (train, valid, test).", names)
    elif unnamed:
        by_split["train"] = unnamed
    return {split: load_split(paths, cache_dir) for split, paths in by_split.items()}


def load_split(paths: Sequence[Path], cache_dir: str | None) -> Dataset:
    """One data set from the files (or folders) of one split, in the given order."""
    parts = [
        _load_split_folder(path, cache_dir) if path.is_dir() else load_file(path, cache_dir)
        for path in paths
    ]
    if len(parts) == 1:
        return parts[0]
    try:
        return import_datasets().concatenate_datasets(parts)
    except (ValueError, TypeError) as error:
        tables = []
        for path, part in zip(paths, parts, strict=True):
            columns = zip(part.column_names, part.data.schema.types, strict=True)
            tables.append(
                f"{path.name}: " + ", ".join(f"{name} ({kind})" for name, kind in columns)
            )
        raise DataError(
            f"These files do not hold the same columns: {'; '.join(tables)}."
        ) from error


def list_data_files(folder: Path) -> list[Path]:
    """The files of rows that lie directly in a folder."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and get_format(path) is not None and path.name not in _SIDE_FILES
    )


def _load_saved(folder: Path) -> dict[str, Dataset]:
    datasets = import_datasets()
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder} looks like a save_to_disk folder but cannot be read: {get_first_line(error)}"
        ) from error
    if isinstance(saved, datasets.Dataset):
        return {get_split_name(folder.name) or "train": check_not_empty(saved, str(folder))}
    return name_splits(saved, str(folder))


def _load_split_folder(folder: Path, cache_dir: str | None) -> Dataset:
    if (folder / "state.json").exists():
        return next(iter(_load_saved(folder).values()))
    files = list_data_files(folder)
    if files:
        return load_split(files, cache_dir)
    if kind := _find_media(folder):
        train = next(
            (p for p in folder.parent.iterdir() if get_split_name(p.name) == "train"), None
        )
        return _load_class_folders(folder, kind, _class_names(train) if train else None)
    raise DataError(f"{folder} holds neither data files nor sub-folders with images or audio.")


def _class_names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir() if child.is_dir())


def _find_media(folder: Path) -> str | None:
    """What the class sub-folders of a folder hold: ``image`` or ``audio``; None if neither."""
    endings = {path.suffix.lower() for path in folder.glob("*/*")}
    return next((kind for kind, known in _MEDIA_ENDINGS.items() if known & endings), None)


def _load_class_folders(folder: Path, kind: str, names: list[str] | None) -> Dataset:
    """Class sub-folders as rows of image or audio and label; files are read on demand."""
    datasets = import_datasets()
    names = names or _class_names(folder)
    unknown = sorted(set(_class_names(folder)) - set(names))
    if unknown:
        raise DataError(
            f"{folder} has the classes {', '.join(unknown)}, which the training data does not "
            f"have: it has {', '.join(names)}."
        )
    paths = [(p, i) for i, name in enumerate(names) for p in sorted((folder / name).glob("*"))]
    files = [
        (str(p if kind == "image" else p.absolute()), i)
        for p, i in paths
        if p.suffix.lower() in _MEDIA_ENDINGS[kind]
    ]
    # Recordings stay paths: `datasets` needs another package for them.
    value = datasets.Image() if kind == "image" else datasets.Value("string")
    features = datasets.Features({kind: value, "label": datasets.ClassLabel(names=names)})
    columns = {kind: [path for path, _ in files], "label": [label for _, label in files]}
    return datasets.Dataset.from_dict(columns, features=features)
