"""Classify audio: words, speakers, languages, sounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError
from rapidformer.tasks.base import Batch, PreparedData, Record, Records, Tables
from rapidformer.tasks.labels.labels import SINGLE, get_model_classes, read_labels
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.rows import Columns, is_row_stream
from rapidformer.tasks.sequence_classification import FileClassifier, describe_outputs
from rapidformer.tasks.speech.audio import AUDIO
from rapidformer.tasks.speech.rows import (
    AudioParts,
    AudioRows,
    AudioTask,
    measure_rows,
    prepare_rows,
)

if TYPE_CHECKING:
    from torch import nn

LABEL = ColumnRole(
    "label", "label_column", "the class: a name, or an integer from 0",
    ("label", "labels", "class", "category", "target", "intent_class", "command", "genre",
     "emotion", "language"),
)  # fmt: skip


class AudioClassification(AudioTask, FileClassifier):
    name = "audio_classification"
    description = "classify audio: words, speakers, languages, sounds (wav2vec 2.0, Whisper, AST)"
    notes = "See [Speech and audio](speech.md)."
    columns = (AUDIO, LABEL)
    auto_class = "AutoModelForAudioClassification"
    answer_role = LABEL.name

    def encode_tables(self, parts: AudioParts, tables: Tables, columns: Any) -> PreparedData:
        audio, label = columns["audio"], columns["label"]
        space, labelled = read_labels(tables, label, parts.args, get_model_classes(parts.config))
        if space.problem_type != SINGLE:
            raise DataError(
                f"the column {label} holds numbers or lists: a recording has one class here, a "
                "name or an integer from 0."
            )

        def encode(values: Columns, first: int) -> Columns:
            return {"labels": [space.encode(value) for value in values.get(label, [None])]}

        key = (label, space)
        rows = {
            split: prepare_rows(
                table, split, audio, parts, encode if labelled[split] else None, key
            )
            for split, table in tables.items()
        }
        extras = {"names": space.names, "problem_type": space.problem_type, "labelled": labelled}
        return self._finish(parts, rows, extras, space.get_model_settings())

    def encode_input(self, parts: AudioParts, table: list[Record], columns: Any) -> PreparedData:
        column = columns["audio"]
        measure_rows(table, "test", column, parts)
        audio = AudioRows.cut(table, column, "test", parts, [[0.0]] * len(table))
        extras = {**describe_outputs(parts.config), "labelled": {"test": False}}
        return self._finish(parts, {"test": audio}, extras, {})

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> Records:
        from rapidformer.tasks.speech.losses import drop_seeds

        return super().evaluate_step(model, drop_seeds(batch), prepared)

    @staticmethod
    def _finish(
        parts: AudioParts, rows: Mapping[str, Any], extras: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> PreparedData:  # fmt: skip
        from rapidformer.tasks.speech.losses import OwnLoss

        loss = OwnLoss(is_stream=is_row_stream(rows.get("train")))
        return parts.prepare(rows, loss, settings, extras=extras, processor=parts.extractor)
