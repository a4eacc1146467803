"""Files that rows name by their paths, which begin next to the data file; and images of rows.

An image is a file, bytes, base64, an address or an object; errors name the row.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.data.files import without_decoding
from rapidformer.data.folders import get_split_name
from rapidformer.data.sources import SPLITS_BY_FLAG, as_list
from rapidformer.errors import DataError, MissingPackageError
from rapidformer.tasks.rows.columns import ColumnRole, find_column
from rapidformer.tasks.rows.rows import as_table, get_column, get_column_names, take_rows


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


IMAGES = ColumnRole(
    "images", "image_column", "the images of a row: one, or a list",
    ("images", "image", "img", "pictures", "picture", "image_path"), required=False,
)  # fmt: skip
_SECONDS = 30
_LOOKED_AT = 1_000
_ORIENTATION = 0x0112
"""The EXIF tag of how a camera was held; from 5 on, width and height are exchanged."""


def check_no_images(tables: Mapping[str, Any], args: Settings) -> None:
    """Refuse rows with images for a task that would train a model that sees on their text alone."""
    for split, rows in tables.items():
        column = find_column(IMAGES, get_column_names(rows), args)
        if column is None:
            continue
        first = without_decoding(take_rows(as_table(rows), 0, _LOOKED_AT), "Image", column)
        number = next((n for n, value in enumerate(get_column(first, column), start=1) if value), 0)
        if number:
            raise DataError(
                f"{split}, row {number}: it has images (in the column {column}), and --task "
                f"{args.task} reads text alone: use --task image_text, or take the column out of "
                "the data."
            )


def open_image(value: Any, place: str, folders: Sequence[Path] = ()) -> Any:
    """The image in RGB, the right way up."""
    from PIL import ImageOps

    image = _open(value, place, folders)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError) as error:  # PIL's PNG reader raises both
        raise DataError(
            f"{place}: {describe_image(value)} cannot be read as an image ({error})."
        ) from None
    finally:
        if image is not value:
            image.close()


def measure_image(value: Any, place: str, folders: Sequence[Path] = ()) -> tuple[int, int]:
    """Width and height as ``open_image`` returns it; reads the header only."""
    image = _open(value, place, folders)
    # To look for EXIF after the pixels, PIL would read them all.
    has_none = image.format == "PNG" and "exif" not in image.info
    is_on_its_side = not has_none and image.getexif().get(_ORIENTATION, 1) >= 5
    size: tuple[int, int] = image.size[::-1] if is_on_its_side else image.size
    if image is not value:
        image.close()
    return size


def _open(value: Any, place: str, folders: Sequence[Path] = ()) -> Any:
    """The image; a file's pixels are read when they are needed."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingPackageError("pillow", "an image", "image") from None

    if hasattr(value, "convert"):
        return value
    if hasattr(value, "__array_interface__"):
        return Image.fromarray(value)
    try:
        return Image.open(_find_source(value, place, folders))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        # PIL calls a file in memory by its address, and one on disk by its whole path.
        is_named = isinstance(error, UnidentifiedImageError) or len(str(error)) > 200
        reason = "" if is_named else f" ({error})"
        raise DataError(
            f"{place}: {describe_image(value)} cannot be read as an image{reason}."
        ) from None


def _find_source(value: Any, place: str, folders: Sequence[Path]) -> Any:
    """A file, or one in memory."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return BytesIO(value)
    if isinstance(value, Path):
        value = str(value)
    if value is None or value == "":
        raise DataError(f"{place}: there is no image.")
    if not isinstance(value, str):
        raise DataError(
            f"{place}: an image must be a path, an address, bytes or a picture, not a "
            f"{type(value).__name__}."
        )
    if value.startswith("data:"):
        try:
            return BytesIO(b64decode(value.partition(",")[2], validate=True))
        except binascii.Error:
            raise DataError(f"{place}: its image is not valid base64.") from None
    if value.startswith(("http://", "https://")):
        with urlopen(value, timeout=_SECONDS) as answer:
            return BytesIO(answer.read())
    path = Path(value.removeprefix("file://")).expanduser()
    return find_file(path, place, folders, "image")


def describe_image(value: Any) -> str:
    """What to call the image: its path or address, if it has one."""
    if isinstance(value, dict):
        value = value.get("path")
    is_name = isinstance(value, (str, Path)) and not str(value).startswith("data:")
    return str(value)[:200] if is_name else "the image"
