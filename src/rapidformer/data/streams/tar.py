"""Shards in webdataset's layout: the files of a tar archive with the same stem are one row.

Columns get the names that tasks look for: a picture is `image`, a sound `audio`, `.txt` is `text`,
`.cls` is `label`, and the fields of a `.json` object are columns of their own. With a second ending
(`0001.left.jpg`), what stands between the dots is the column's name.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rapidformer.data.streams.shards import COMPRESSED, FileShard, Item, Row, open_file
from rapidformer.errors import DataError
from rapidformer.strict_json import describe_fault, parse_json

TAR = (".tar", ".tgz", *(f".tar{ending}" for ending in COMPRESSED))
_COLUMNS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"), "image"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a"), "audio"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"), "cls": "label",
}  # fmt: skip


@dataclass(frozen=True)
class TarShard(FileShard):
    """A tar archive; a plain one is sought by the offset of a row's first file."""

    @property
    def can_seek(self) -> bool:
        return self.path.suffix == ".tar"

    def read(self, done: int, offset: int) -> Iterator[Item]:
        number, offset = self.start(done, offset)
        with open_file(self.path) as file:
            if offset:
                file.seek(offset)
            with tarfile.open(fileobj=file, mode="r:" if self.can_seek else "r|") as archive:
                stem = ""
                files: dict[str, bytes] = {}
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    name = PurePosixPath(member.name)
                    if not member.isfile() or name.name.startswith("."):
                        continue
                    base, _, ending = name.name.partition(".")
                    if (found := str(name.parent / base)) != stem:
                        if files:
                            number += 1
                            if number > done:
                                yield number, (stem, files), member.offset
                        stem, files = found, {}
                    content = archive.extractfile(member)
                    files[ending.lower()] = content.read() if content else b""
                if files and number >= done:
                    yield number + 1, (stem, files), archive.offset

    def decode(self, stored: Any) -> Row:
        stem, files = stored
        row: Row = {"__key__": stem}
        for ending, content in files.items():
            given, _, kind = ending.rpartition(".")
            try:
                if kind == "json":
                    value = parse_json(content)
                    row |= (
                        value if isinstance(value, dict) and not given else {given or kind: value}
                    )
                else:
                    column = _COLUMNS.get(kind, kind)
                    row[given or column] = _read(content, column, f"{stem}.{ending}")
            except ValueError as error:
                fault = describe_fault(error) if kind == "json" else str(error)
                raise DataError(f"{stem}.{ending} cannot be read ({fault}).") from None
        return row


def _read(content: bytes, column: str, name: str) -> Any:
    if column == "text":
        return content.decode()
    if column == "label":
        text = content.decode().strip()
        return int(text) if text.lstrip("-").isdigit() else text
    return {"bytes": content, "path": name} if column in ("image", "audio") else content
