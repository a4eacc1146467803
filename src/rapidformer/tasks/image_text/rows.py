"""Rows with images: all are checked and measured first, and their images opened when asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rapidformer.data.streams.left_out import LeftOut
from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.chat.features import NO_ANSWER, ChatEncoder, drop_left_out, report_trained
from rapidformer.tasks.chat.turns import BadRowError, find_last_answer, name_rows
from rapidformer.tasks.image_text.conversations import Conversation, read_conversation
from rapidformer.tasks.image_text.encoding import ImageEncoder, Rendered
from rapidformer.tasks.rows.named_files import measure_image, open_image
from rapidformer.tasks.rows.rows import as_table, get_column, name_split

Problems = dict[str, list[int]]
"""Why rows cannot be read, and their numbers from 1."""
_LARGE = 5_000
_CHUNK = 256


@dataclass(frozen=True, eq=False)
class ImageTextRows:
    """Conversations with their images, read on request."""

    rows: Any
    split: str
    columns: ChatColumns
    image_column: str | None
    folders: Sequence[Path]
    numbers: Sequence[int] = ()
    """Those that are trained on, in the table."""
    lengths: Sequence[int] = ()
    """Of each of these, in tokens."""
    is_asked: bool = False
    """Whether the last answer is what the model is asked for."""
    system: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """What a conversation without a system message begins with."""
    column_names = ("length",)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int | str) -> Any:
        if isinstance(index, str):  # for batches of similar length
            return self.lengths
        number = self.numbers[index]
        conversation, place = self.read(number), self.name_row(number)
        images = [open_image(image, place, self.folders) for image in conversation.images]
        return {"conversation": conversation, "images": images, "place": place}

    def name_row(self, number: int) -> str:
        return f"{self.split}, row {number + 1}"

    def read(self, number: int) -> Conversation:
        """What the model is shown of a row; raises BadRowError."""
        return self.read_row(self.rows[int(number)])

    def read_row(self, row: Mapping[str, Any]) -> Conversation:
        conversation = read_conversation(row, self.columns, self.image_column)
        if not self.is_asked:
            end = find_last_answer(conversation.messages)  # turns after it have no effect on a loss
            return conversation.cut(end) if end else conversation
        asked = conversation.split_answer()[0]
        if asked.messages and asked.messages[0]["role"] == "system":
            return asked
        return asked._replace(messages=[*self.system, *asked.messages])


class Measured(NamedTuple):
    """What is known of a split before its first batch."""

    numbers: list[int]
    lengths: list[int]
    has_images: bool


def measure_rows(rows: ImageTextRows, encoder: ImageEncoder, chat: ChatEncoder) -> Measured | None:
    """Check every row, and leave out those that are too long or have no answer.

    None for a test split without answers. All of a row is read here but the pixels of its images.
    """
    total = len(rows.rows)
    if total >= _LARGE:
        get_logger().info(f"preparing {total:,} rows with images")
    problems: Problems = defaultdict(list)
    features: list[dict[str, Any]] = []
    images = 0
    for start in range(0, total, _CHUNK):
        numbers = range(start, min(start + _CHUNK, total))
        chunk = [(rows.rows[number], number, rows.folders) for number in numbers]
        for conversation, feature in measure_chunk(rows, chunk, encoder, chat, problems):
            images += len(conversation.images)
            features.append(feature | {"number": len(features)})
    refuse(problems, rows.split)
    if rows.split == "test" and set(get_column(features, "left_out")) == {NO_ANSWER}:
        return None
    kept = drop_left_out(features, rows.split).features
    report_trained(kept, rows.split, chat)
    if images:
        get_logger().info("images    %s: %s in %s rows", rows.split, f"{images:,}", f"{total:,}")
    return Measured(get_column(kept, "number"), get_column(kept, "length"), images > 0)


def measure_chunk(
    rows: ImageTextRows,
    chunk: Iterable[tuple[Mapping[str, Any], int, Sequence[Path]]],
    encoder: ImageEncoder,
    chat: ChatEncoder,
    problems: Problems,
) -> list[tuple[Conversation, dict[str, Any]]]:
    """Rows (with numbers, and the folders of their files) as conversations, with what is known of
    each; those that cannot be read are added to the ``problems``."""
    measured: list[tuple[Conversation, dict[str, Any]]] = []
    waiting: list[tuple[dict[str, Any], Rendered, list[tuple[int, int]]]] = []
    for row, number, folders in chunk:
        try:
            conversation = rows.read_row(row)
            rendered = encoder.render(conversation)
        except BadRowError as reason:
            problems[str(reason)].append(number + 1)
            continue
        place = rows.name_row(number)
        sizes = [measure_image(image, place, folders) for image in conversation.images]
        feature = {"length": 0, "trained": 0, "is_cut": False, "ends": False, "left_out": ""}
        measured.append((conversation, feature))
        if isinstance(rendered, Rendered):
            waiting.append((feature, rendered, sizes))
        else:
            feature["left_out"] = rendered
    if waiting:
        features, texts, sizes_of = zip(*waiting, strict=True)
        end = chat.get_end_id()
        counted = encoder.count_tokens(texts, sizes_of)
        for feature, (length, labels) in zip(features, counted, strict=True):
            feature |= {"length": length, "trained": len(labels), "ends": end in labels}
            if length > chat.length:
                feature["left_out"] = (
                    f"longer than {chat.length} tokens with the images, which cannot be cut "
                    "(--seq-length)"
                )
            elif not labels:
                feature["left_out"] = NO_ANSWER
    return measured


def refuse(problems: Problems, split: str) -> None:
    """Raise an error that names all rows with problems, if there are any."""
    texts = []
    for reason, numbers in problems.items():
        named = name_rows(numbers)
        texts.append(f"{split}, {named}: {'each' if len(numbers) > 1 else 'it'} {reason}.")
    if texts:
        raise DataError(" ".join(texts))


_EMPTY = Conversation([{"role": "user", "content": "."}], [])


@dataclass(eq=False)
class ImageTextStream:
    """What becomes of the rows of a stream, which the rank reads that trains on them.

    A row has its place in a batch before it is read. So one that is too long or has no answer stays
    there, as a short text without labels or images, and adds nothing to any loss.
    """

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
