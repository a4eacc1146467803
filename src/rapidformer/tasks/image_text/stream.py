"""Rows of a stream with images, which the rank reads that trains on them.

A table leaves out rows that are too long or have no answer. A row of a stream has its place in a
batch before it is read. So it stays there, as a short text without labels or images, and adds
nothing to any loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.data.streams.left_out import LeftOut
from rapidformer.tasks.chat.features import ChatEncoder, drop_left_out, report_trained
from rapidformer.tasks.image_text.conversations import Conversation
from rapidformer.tasks.image_text.encoding import ImageEncoder
from rapidformer.tasks.image_text.rows import ImageTextRows, Problems, measure_chunk, refuse
from rapidformer.tasks.rows.images import open_image
from rapidformer.tasks.rows.rows import as_table, name_split

_EMPTY = Conversation([{"role": "user", "content": "."}], [])


@dataclass(eq=False)
class ImageTextStream:
    """What becomes of the rows of a stream."""

    rows: ImageTextRows
    encoder: ImageEncoder
    chat: ChatEncoder

    def __post_init__(self) -> None:
        self._measured = self.rows.rows.then(self._measure, expands=False)

    def report(self) -> bool:
        """Report the first rows; whether any of them has an image."""
        name, head = name_split(self.rows.split, self._measured), as_table(self._measured)
        report_trained(drop_left_out(head, name).features, name, self.chat)
        return any(feature["conversation"].images for feature in head)

    def open(self) -> Any:
        return self._measured.map_numbered(self._open)

    def _measure(self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[Any]) -> list[Any]:
        """Read all of the rows but the pixels of their images."""
        problems: Problems = defaultdict(list)
        chunk = [(row, n, self._find_folders(n)) for row, n in zip(rows, numbers, strict=True)]
        measured = measure_chunk(self.rows, chunk, self.encoder, self.chat, problems)
        refuse(problems, self.rows.split)
        return [{**feature, "conversation": conversation} for conversation, feature in measured]

    def _open(self, feature: Mapping[str, Any], number: Any) -> dict[str, Any]:
        conversation, place = feature["conversation"], self.rows.name_row(number)
        if reason := feature["left_out"]:
            return LeftOut({"conversation": _EMPTY, "images": [], "place": place}, reason)
        folders = self._find_folders(number)
        images = [open_image(image, place, folders) for image in conversation.images]
        return {"conversation": conversation, "images": images, "place": place}

    def _find_folders(self, number: Any) -> list[Path]:
        return [Path(number.shard).parent, *self.rows.folders]
