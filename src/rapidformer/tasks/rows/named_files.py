"""Files that rows name by their paths, which begin next to the data file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rapidformer.config.task_sections import DataArguments
from rapidformer.data.folders import get_split_name
from rapidformer.data.sources import SPLITS_BY_FLAG, as_list
from rapidformer.errors import DataError


def find_file(path: Path, place: str, folders: Sequence[Path], kind: str) -> Path:
    """The file that a row names; a relative path begins in one of the folders."""
    found = [folder / path for folder in folders if (folder / path).is_file()]
    if len(found) > 1 and len({file.resolve() for file in found}) > 1:
        raise DataError(
            f"{place}: {path} may be {found[0]} or {found[1]}. Write its whole path, or name the "
            "data as a mixture: each set then reads its own files (--data-weights)."
        )
    if found or path.is_file():
        return found[0] if found else path
    where = "" if path.is_absolute() or not folders else f" in {' or '.join(map(str, folders))}"
    raise DataError(f"{place}: there is no {kind} file {path}{where}.")


def name_file(value: Any, number: int) -> str:
    """The path of a file that a cell holds, or else the number of its row."""
    path = value.get("path") if isinstance(value, Mapping) else value
    return path if isinstance(path, str) else str(number)


def list_folders(args: DataArguments, split: str) -> tuple[Path, ...]:
    """Where the paths of a split's rows begin: next to its data files."""
    return tuple(dict.fromkeys(_iterate_folders(args, split)))


def _iterate_folders(args: DataArguments, split: str) -> Iterator[Path]:
    flag = next((flag for flag, name in SPLITS_BY_FLAG.items() if name == split), "test_data")
    for text in (*as_list(getattr(args, flag)), *as_list(args.data_path or args.data_dir)):
        path = Path(text).expanduser()
        if not path.is_dir():
            yield path.parent
            continue
        for folder in (path / args.data_name, path) if args.data_name else (path,):
            children = sorted(folder.iterdir()) if folder.is_dir() else []
            yield from (p for p in children if p.is_dir() and get_split_name(p.name) == split)
            yield folder
