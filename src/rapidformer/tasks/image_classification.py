"""Classify images, which are opened and resized in the loader's processes when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rapidformer.config import Settings
from rapidformer.data.files import without_decoding
from rapidformer.tasks.base import PreparedData, Record, Row
from rapidformer.tasks.labels.labels import LabelSpace, get_model_classes, read_labels
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.named_files import name_file, open_image
from rapidformer.tasks.rows.rows import as_rows, is_row_stream
from rapidformer.tasks.sequence_classification import FileClassifier, describe_outputs

IMAGE = ColumnRole(
    "image", "image_column", "the image, or the path of its file",
    ("image", "img", "images", "picture", "file", "path", "image_path", "file_name"),
)  # fmt: skip
LABEL = ColumnRole(
    "label", "label_column", "the class: a name, or an integer from 0",
    ("label", "labels", "fine_label", "class", "category", "target"),
)  # fmt: skip


class ImageClassification(FileClassifier):
    name = "image_classification"
    description = "classify images (ViT and other vision models)"
    columns = (IMAGE, LABEL)
    auto_class = "AutoModelForImageClassification"
    answer_role = LABEL.name

    def load_parts(self, args: Settings) -> _Parts:
        from rapidformer.models.build import load_image_processor
        from rapidformer.models.configuration import load_config

        return _Parts(args, load_config(args), load_image_processor(args))

    def read_input(self, rows: Sequence[Row], parts: _Parts) -> list[Record]:
        return as_rows(rows, parts.args.image_column or "image")

    def encode_tables(self, parts: _Parts, tables: Mapping[str, Any], columns: Any) -> PreparedData:
        classes = get_model_classes(parts.config)
        space, labelled = read_labels(tables, columns["label"], parts.args, classes)
        images: dict[str, Any] = {
            split: _encode(
                rows, columns["image"], parts.processor, split, labelled[split] and space
            )
            for split, rows in tables.items()
        }
        extras = {"names": space.names, "problem_type": space.problem_type, "labelled": labelled}
        settings = space.get_model_settings()
        return parts.prepare(**images, model_settings=settings, extras=extras)

    def encode_input(self, parts: _Parts, table: list[Record], columns: Any) -> PreparedData:
        extras = {**describe_outputs(parts.config), "labelled": {"test": False}}
        images = _ImageRows(table, columns["image"], parts.processor, "input", None)
        return parts.prepare(test=images, extras=extras)


class _Parts(NamedTuple):
    args: Settings
    config: Any
    processor: Any

    def prepare(self, **prepared: Any) -> PreparedData:
        from rapidformer.data.collate import PadCollator

        return PreparedData(collate=PadCollator(), processor=self.processor, **prepared)


def _encode(
    rows: Any, column: str, processor: Any, split: str, space: LabelSpace | Literal[False]
) -> Any:
    """Rows of pixel values, computed on request."""
    kept = without_decoding(rows, "Image", column)
    images = _ImageRows(kept, column, processor, split, space or None)
    return rows.map_numbered(images.encode) if is_row_stream(rows) else images


@dataclass(frozen=True, eq=False)
class _ImageRows:
    """Rows of pixel values, computed on request."""

    rows: Any
    column: str
    processor: Any
    split: str
    space: LabelSpace | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encode(self.rows[int(index)], index)

    def encode(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The pixels and the label of a row."""
        import numpy as np

        image = open_image(row[self.column], f"{self.split}, row {index + 1}")
        encoded = self.processor(images=image)
        names = getattr(self.processor, "model_input_names", ("pixel_values",))
        result: dict[str, Any] = {n: np.asarray(encoded[n][0]) for n in names if n in encoded}
        result["pixel_values"] = result["pixel_values"].astype(np.float32, copy=False)
        if self.space is not None:
            result["labels"] = self.space.encode(row[self.space.column])
        return result

    def get_name(self, index: int) -> str:
        return name_file(self.rows[index][self.column], index)
