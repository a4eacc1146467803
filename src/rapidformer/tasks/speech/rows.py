"""Rows of audio: measured before training, decoded in the loader's processes when asked for.

Those of a stream are measured when they are decoded: one that the model cannot learn from becomes a
sample of silence without labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rapidformer.config import Settings
from rapidformer.data.files import without_decoding
from rapidformer.data.streams.left_out import LeftOut
from rapidformer.errors import ConfigurationError, DataError, count
from rapidformer.log import get_logger, warn
from rapidformer.tasks.base import IGNORED_LABEL, PreparedData, Record, Row, Task
from rapidformer.tasks.rows.named_files import list_folders, name_file
from rapidformer.tasks.rows.rows import (
    Columns,
    as_rows,
    get_column,
    is_row_stream,
    map_rows,
    to_rows,
)
from rapidformer.tasks.speech.audio import Clip, open_clip

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from rapidformer.objectives import Objective

Encode = Callable[[Columns, int], Columns]
"""Further columns of features, from rows and the number of the first of them."""
Refuse = Callable[[Mapping[str, Any]], str | None]
"""Why a row is left out; None if it is not."""

_LEAKY = (
    "data2vec-audio", "moonshine", "sew", "sew-d", "speech_to_text", "speecht5",
    "wav2vec2-conformer",
)  # fmt: skip
"""Families whose convolutions or norms read what padding became."""


class AudioParts(NamedTuple):
    """What every task that listens starts from."""

    config: Any
    extractor: Any
    args: Settings
    settings: Mapping[str, Any]
    """What the flags change in the model's configuration."""

    @property
    def window(self) -> float | None:
        """Seconds that the model hears at once, if that is fixed, as Whisper's 30."""
        samples = getattr(self.extractor, "n_samples", None)
        return None if samples is None else samples / self.extractor.sampling_rate

    def count_steps(self, seconds: float) -> int | None:
        """Steps that the convolutions make of raw audio; None if the model has none."""
        if not hasattr(self.config, "conv_kernel"):
            return None
        size: int = round(seconds * self.extractor.sampling_rate)
        for kernel, stride in zip(self.config.conv_kernel, self.config.conv_stride, strict=True):
            size = (size - kernel) // stride + 1
        return max(size, 0)

    def extract(self, samples: np.ndarray, *, has_mask: bool = False) -> dict[str, Any]:
        """The model's inputs; ``has_mask``: with a mask, where there is none by default."""
        import numpy as np

        options = {"return_attention_mask": True} if has_mask else {}
        inputs = self.extractor(samples, sampling_rate=self.extractor.sampling_rate, **options)
        return {name: np.asarray(values[0]) for name, values in inputs.items()}

    def prepare(
        self, rows: Mapping[str, Any], loss: Objective, settings: Mapping[str, Any], **more: Any
    ) -> PreparedData:
        """The splits of a task, with these ``settings`` of its model."""
        from rapidformer.tasks.speech.losses import AudioCollator, masks_anything

        collate = AudioCollator(self.extractor, has_seeds=masks_anything(self.config))
        settings = {**settings, **self.settings}
        return PreparedData(
            **rows, collate=collate, objective=loss, model_settings=settings, **more
        )


class AudioTask(Task):
    """A task that listens."""

    def load_parts(self, args: Settings) -> AudioParts:
        return load_audio_parts(args)

    def load_tables(self, parts: AudioParts, splits: Mapping[str, Any] | None) -> dict[str, Any]:
        """`datasets` would decode the recordings of a stream on every rank."""
        return {
            split: rows.without_decoding("Audio") if is_row_stream(rows) else rows
            for split, rows in super().load_tables(parts, splits).items()
        }

    def read_input(self, rows: Sequence[Row], parts: AudioParts) -> list[Record]:
        return as_rows(rows, parts.args.audio_column or "audio")

    def build_model(
        self, args: Settings, prepared: PreparedData, *, must_be_trained: bool = False
    ) -> nn.Module:
        model = super().build_model(args, prepared, must_be_trained=must_be_trained)
        if not must_be_trained:
            _freeze_feature_encoder(model, args)
        return model


def _freeze_feature_encoder(model: Any, args: Settings) -> None:
    """Freeze the convolutions on raw audio: asked for, or because the weights are pretrained."""
    from rapidformer.models.location import is_from_scratch

    wanted = args.freeze_feature_encoder
    freeze = getattr(model, "freeze_feature_encoder", None)
    if wanted and freeze is None:
        raise ConfigurationError(
            f"--freeze-feature-encoder: {type(model).__name__} has no convolutions on raw audio."
        )
    if freeze is not None and (not is_from_scratch(args) if wanted is None else wanted):
        freeze()
        get_logger().info("frozen    the feature encoder (convolutions on raw audio)")


def load_audio_parts(args: Settings) -> AudioParts:
    """The configuration and the feature extractor of the model."""
    from rapidformer.models.audio import load_feature_extractor
    from rapidformer.models.configuration import load_config
    from rapidformer.models.plan import LAYER_DROPS
    from rapidformer.tasks.speech.losses import get_mask_settings

    config = load_config(args)
    settings = get_mask_settings(config, args)
    # Dropped layers are drawn for a micro-batch, so what is learnt would depend on its size.
    settings |= {name: 0.0 for name in LAYER_DROPS if getattr(config, name, 0.0)}
    for name, value in settings.items():
        setattr(config, name, value)
    parts = AudioParts(config, load_feature_extractor(args, config), args, settings)
    if parts.window is not None and (args.max_audio_seconds or 0) > parts.window:
        raise ConfigurationError(
            f"--max-audio-seconds {args.max_audio_seconds:g}: the model hears {parts.window:g} s "
            "at once. Use at most that, and cut longer recordings."
        )
    if _hears_padding(config) and args.micro_batch_size != 1:
        warn(
            f"{config.model_type} models of this kind read the padding too: what they hear depends "
            "a little on the longest recording of the micro-batch. --micro-batch-size 1 avoids it."
        )
    return parts


def _hears_padding(config: Any) -> bool:
    """Whether the outputs of the model depend on padding, masked or not."""
    return getattr(config, "feat_extract_norm", None) == "group" or config.model_type in _LEAKY


@dataclass(frozen=True, eq=False)
class AudioRows:
    """A model's inputs, and labels if there are any, by number."""

    table: Any
    column: str
    split: str
    folders: Sequence[Path]
    parts: AudioParts
    rows: Sequence[int]
    """Which row of the table each is of."""
    seconds: Sequence[float]
    starts: Sequence[float]
    """Where each begins in its row's recording, in seconds."""
    features: Any = None
    """What is known of each row of the table besides: ``labels``, ``text``."""
    has_mask: bool = False
    """Whether the feature extractor is asked for a mask that it would not give by itself."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | str) -> Any:
        rate, window = self.parts.extractor.sampling_rate, self.parts.window
        if isinstance(index, str):
            return [round(s * rate) for s in self.seconds]
        samples = self.open(index).decode(rate)[round(self.starts[index] * rate) :]
        if window is not None:
            samples = samples[: round(window * rate)]
        result = self.parts.extract(samples, has_mask=self.has_mask)
        if (labels := self.read(index, "labels")) is not None:
            result["labels"] = labels
        return result

    def read(self, index: int, name: str) -> Any:
        """Something else that is known of a row; None if it is not."""
        return None if self.features is None else self.features[int(self.rows[index])].get(name)

    @classmethod
    def cut(
        cls, table: Any, column: str, split: str, parts: AudioParts,
        windows: Sequence[Sequence[float]],
    ) -> AudioRows:  # fmt: skip
        """Recordings in windows, by where each of them begins."""
        pairs = [(row, start) for row, starts in enumerate(windows) for start in starts]
        rows, starts = zip(*pairs, strict=True)
        folders = list_folders(parts.args, split)
        return cls(table, column, split, folders, parts, rows, [0.0] * len(rows), starts)

    def open(self, index: int) -> Clip:
        number = self.rows[index]
        row, place = self.table[int(number)], f"{self.split}, row {number + 1}"
        return open_clip(row, self.column, place, self.folders)

    def get_name(self, index: int) -> str:
        number = int(self.rows[index])
        return name_file(self.table[number].get(self.column), number)

    def describe(self, index: int) -> str:
        """The audio in words, for `rapidformer data show`."""
        seconds, rate = self.open(index).measure()
        wanted = self.parts.extractor.sampling_rate
        resampled = f", resampled to {wanted:,} Hz" if rate != wanted else ""
        return f"{self.get_name(index)}: {seconds:.2f} s at {rate:,} Hz{resampled}"

    @property
    def column_names(self) -> list[str]:
        """The column that is known without decoding: lengths, in samples of the model's rate."""
        return [self.parts.args.length_column]


def measure_rows(
    table: Any, split: str, column: str, parts: AudioParts, encode: Encode | None = None,
    key: Sequence[Any] = (),
) -> tuple[Any, Any]:  # fmt: skip
    """The table without decoding, and the ``seconds`` of every row with what ``encode`` adds.

    Reads the headers of all files: what is missing or broken is found before training starts.
    """
    table, folders = without_decoding(table, "Audio", column), list_folders(parts.args, split)

    def measure(columns: Columns, indices: list[int]) -> Columns:
        clips = [
            open_clip(row, column, f"{split}, row {indices[0] + number + 1}", folders)
            for number, row in enumerate(to_rows(columns))
        ]
        measured = {"seconds": [clip.measure()[0] for clip in clips]}
        return measured if encode is None else measured | encode(columns, indices[0])

    whole = ("audio", split, column, *map(str, folders), *key)
    return table, map_rows(table, measure, workers=parts.args.preprocessing_workers, key=whole)


def prepare_rows(
    table: Any, split: str, column: str, parts: AudioParts, encode: Encode | None,
    key: Sequence[Any] = (), refuse: Refuse | None = None, *, has_mask: bool = False,
) -> Any:  # fmt: skip
    """The rows that the model can learn from; those of a table that are left out are reported."""
    if is_row_stream(table):
        assert encode is not None  # only training rows are a stream
        return _stream_rows(table, column, parts, encode, refuse, has_mask=has_mask)
    table, features = measure_rows(table, split, column, parts, encode, key)
    reasons: dict[str, list[int]] = {}
    kept: list[int] = []
    for number in range(len(features)):
        row = features[number]
        reason = _refuse(row["seconds"], parts) or (refuse(row) if refuse else None)
        reasons.setdefault(reason, []).append(number) if reason else kept.append(number)
    for reason, numbers in reasons.items():
        warn(
            f"{split}: {count(len(numbers), 'row')} of {len(features):,} left out: {reason} "
            f"(the first is row {numbers[0] + 1})."
        )
    if not kept:
        raise DataError(f"{split}: no row is left: {'; '.join(reasons)}.")
    seconds = get_column(features, "seconds")
    return AudioRows(
        table, column, split, list_folders(parts.args, split), parts, rows=kept,
        seconds=[seconds[number] for number in kept], starts=[0.0] * len(kept), features=features,
        has_mask=has_mask,
    )  # fmt: skip


def _stream_rows(
    stream: Any, column: str, parts: AudioParts, encode: Encode, refuse: Refuse | None,
    *, has_mask: bool,
) -> Any:  # fmt: skip
    """The samples of a stream, each measured and decoded by the process that uses it.

    ``encode`` gives the ``labels``.
    """
    files = [shard.path for shard in stream.shards if hasattr(shard, "path")]
    folders = tuple(dict.fromkeys(file.parent for file in files))
    rate = parts.extractor.sampling_rate

    def read(row: Mapping[str, Any], number: int) -> dict[str, Any]:
        import numpy as np

        clip = open_clip(row, column, f"train, row {number + 1}", folders)
        features = encode({name: [value] for name, value in row.items()}, number)
        known = {name: values[0] for name, values in features.items()}
        known["seconds"] = clip.measure()[0]
        labels = known["labels"]
        reason = _refuse(known["seconds"], parts) or (refuse(known) if refuse else None)
        if reason is None:
            return {**parts.extract(clip.decode(rate), has_mask=has_mask), "labels": labels}
        labels = [IGNORED_LABEL] if isinstance(labels, list) else IGNORED_LABEL
        silence = parts.extract(np.zeros(rate, dtype=np.float32), has_mask=has_mask)
        return LeftOut({**silence, "labels": labels}, reason)

    return stream.map_numbered(read)


def _refuse(seconds: float, parts: AudioParts) -> str | None:
    most = parts.args.max_audio_seconds or parts.window
    if most is not None and seconds > most:
        return f"longer than {most:g} s"
    if parts.count_steps(seconds) == 0:
        return "too short for the model to hear anything"
    return None
