"""Classify images.

Images are opened and resized when a row is requested, in the loader's processes, so that a folder
larger than memory can be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import DataError, MissingPackageError
from rapidformer.tasks.base import PreparedData, Record, Task
from rapidformer.tasks.labels.labels import read_labels
from rapidformer.tasks.labels.space import SINGLE, get_model_classes, get_output_names
from rapidformer.tasks.rows.columns import ColumnRole, find_column, find_columns
from rapidformer.tasks.rows.rows import as_rows, get_column_names, get_splits

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rapidformer.tasks.labels.space import LabelSpace
    from rapidformer.tasks.metrics.tally import Tally

IMAGE = ColumnRole(
    name="image",
    candidates=("image", "img", "images", "picture", "file", "path", "image_path", "file_name"),
    holds="the image, or the path of its file",
    setting="image_column",
)
LABEL = ColumnRole(
    name="label",
    candidates=("label", "labels", "fine_label", "class", "category", "target"),
    holds="the class: a name, or an integer from 0",
    setting="label_column",
)


class ImageClassification(Task):
    name = "image_classification"
    aliases = ("vision",)
    description = "classify images (ViT and other vision models)"
    columns = (IMAGE, LABEL)
    auto_class = "AutoModelForImageClassification"
    answer_keys = frozenset({"label", "labels", "score", "scores"})
    metrics = ("accuracy", "f1", "f1_macro", "loss")
    answer_role = LABEL.name
    best_metric = "accuracy"
    greater_is_better = True

    def prepare(self, args: Settings, splits: Mapping[str, Any] | None = None) -> PreparedData:
        from rapidformer.data.collate import PadCollator
        from rapidformer.models.build import load_image_processor
        from rapidformer.models.configuration import load_config

        config, processor = load_config(args), load_image_processor(args)
        tables = get_splits(args, splits)
        available = get_column_names(next(iter(tables.values())))
        columns = find_columns((LABEL, IMAGE), available, args)
        label, image = columns["label"], columns["image"]
        space, labelled = read_labels(tables, label, args, get_model_classes(config))
        images = {
            split: ImageRows(
                rows, image, processor, split, (label, space) if labelled[split] else None
            )
            for split, rows in tables.items()
        }
        return PreparedData(
            **images,
            collate=PadCollator(),
            processor=processor,
            model_settings=space.get_model_settings(),
            extras={
                "image": image,
                "names": space.names,
                "problem_type": space.problem_type,
                "labelled": labelled,
            },
        )

    def prepare_for_prediction(
        self, args: Settings, rows: Sequence[dict[str, Any] | str]
    ) -> PreparedData:
        from rapidformer.data.collate import PadCollator
        from rapidformer.models.build import load_image_processor
        from rapidformer.models.configuration import load_config
        from rapidformer.tasks.sequence_classification import get_problem_type

        config, processor = load_config(args), load_image_processor(args)
        table = as_rows(rows, args.image_column or "image")
        image = str(find_column(IMAGE, get_column_names(table), args))
        return PreparedData(
            test=ImageRows(table, image, processor, "input", None),
            collate=PadCollator(),
            processor=processor,
            extras={
                "image": image,
                "names": get_output_names(config),
                "problem_type": get_problem_type(config),
                "labelled": {"test": False},
            },
        )

    def evaluate_step(
        self, model: nn.Module, batch: dict[str, torch.Tensor], prepared: PreparedData
    ) -> list[Record]:
        from rapidformer.tasks.evaluation.scoring import score_classes

        logits = model(pixel_values=batch["pixel_values"]).logits
        kind = prepared.extras.get("problem_type", SINGLE)
        return score_classes(logits, batch.get("labels"), kind)

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        from rapidformer.tasks.sequence_classification import build_classifier_tally

        return build_classifier_tally(prepared.extras["problem_type"], prepared.extras["names"])

    def predictions(
        self, records: list[Record], prepared: PreparedData, split: str
    ) -> list[dict[str, Any]]:
        from rapidformer.tasks.sequence_classification import describe_record

        kind, names = prepared.extras["problem_type"], prepared.extras["names"]
        images: Any = prepared.get_split(split)
        return [
            {"image": images.get_name(index)} | describe_record(record, kind, names)
            for index, record in enumerate(records, start=prepared.extras.get("first", 0))
        ]

    def take_rows(self, prepared: PreparedData, start: int, stop: int) -> PreparedData:
        return replace(prepared, extras={**prepared.extras, "first": start})


class ImageRows:
    """Rows of pixel values, computed on request."""

    def __init__(
        self,
        rows: Any,
        column: str,
        processor: Any,
        split: str,
        labels: tuple[str, LabelSpace] | None,
    ) -> None:
        self._rows = _without_decoding(rows, column)
        self._column = column
        self._processor = processor
        self._split = split
        self._labels = labels

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        row = self._rows[int(index)]
        image = _open_image(row[self._column], f"{self._split}, row {index + 1}")
        pixels = np.asarray(self._processor(images=image)["pixel_values"][0], dtype=np.float32)
        result: dict[str, Any] = {"pixel_values": pixels}
        if self._labels is not None:
            column, space = self._labels
            result["labels"] = space.encode(row[column])
        return result

    def get_name(self, index: int) -> str:
        """The image's file if it has one, otherwise its number."""
        value = self._rows[index][self._column]
        path = value.get("path") if isinstance(value, dict) else value
        return path if isinstance(path, str) else str(index)


def _without_decoding(rows: Any, column: str) -> Any:
    """Turn off decoding by `datasets`, so that we can name the row of a broken file."""
    feature: Any = rows.features.get(column) if hasattr(rows, "features") else None
    if type(feature).__name__ != "Image":
        return rows
    return rows.cast_column(column, type(feature)(decode=False))


def _open_image(value: Any, place: str) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingPackageError("pillow", "image_classification", "image") from None

    source = value
    if isinstance(value, dict):
        source = BytesIO(value["bytes"]) if value.get("bytes") else value.get("path")
    elif isinstance(value, bytes):
        source = BytesIO(value)
    if source is None:
        raise DataError(f"{place}: there is no image.")
    if hasattr(source, "convert"):
        return source.convert("RGB")
    try:
        with Image.open(source) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise DataError(f"{place}: there is no image file {source}.") from None
    except (UnidentifiedImageError, OSError) as error:
        name = source if isinstance(source, str) else "the image"
        raise DataError(f"{place}: {name} cannot be read as an image ({error}).") from None
