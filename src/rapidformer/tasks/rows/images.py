"""Images of rows, as files, bytes, base64, addresses or objects; errors name the row."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rapidformer.config import Settings
from rapidformer.data.files import without_decoding
from rapidformer.errors import DataError, MissingPackageError
from rapidformer.tasks.rows.columns import ColumnRole, find_column
from rapidformer.tasks.rows.named_files import find_file
from rapidformer.tasks.rows.rows import as_table, get_column, get_column_names, take_rows

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
