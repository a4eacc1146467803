"""Read audio: a file, the bytes of one, or an array, as one channel at the rate of the model.

`datasets` would decode with torchcodec, in the process that reads the rows. Here, soundfile does so
in the loader's processes, and an error names the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rapidformer.errors import DataError, MissingPackageError
from rapidformer.tasks.rows.columns import ColumnRole
from rapidformer.tasks.rows.named_files import find_file

if TYPE_CHECKING:
    import numpy as np

AUDIO = ColumnRole(
    "audio", "audio_column", "the audio, or the path of its file",
    ("audio", "speech", "sound", "wav", "file", "path", "audio_path", "audio_filepath",
     "file_name", "filename"),
)  # fmt: skip
_RATES = ("sampling_rate", "sample_rate")


class Clip(NamedTuple):
    """Audio that has not been decoded yet."""

    source: Any
    """A file, its bytes, or the samples."""
    rate: int | None
    """The sampling rate of samples; a file says its own."""
    place: str
    """The row, for errors."""

    @property
    def name(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else "the audio"

    def measure(self) -> tuple[float, int]:
        """Its seconds and its sampling rate, from the header."""
        if self.rate is not None:
            size, rate = max(self.source.shape), self.rate
        else:
            info = self._call("info")
            size, rate = info.frames, info.samplerate
        if not size:
            raise DataError(f"{self.place}: {self.name} is empty: it has no samples.")
        return size / rate, rate

    def decode(self, rate: int) -> np.ndarray:
        """One channel at this sampling rate, as fp32 from -1 to 1."""
        import numpy as np

        samples, own = self.source, self.rate
        if own is None:
            samples, own = self._call("read", dtype="float32")
        if samples.dtype.kind == "i":
            samples = samples / np.float32(np.iinfo(samples.dtype).max)
        if samples.ndim > 1:
            # soundfile has channels last, other readers first: there are fewer of them than samples
            samples = samples.mean(axis=int(np.argmin(samples.shape)))
        if not samples.size:
            raise DataError(f"{self.place}: {self.name} is empty: it has no samples.")
        if not np.isfinite(samples).all():
            raise DataError(f"{self.place}: {self.name} has samples that are no numbers (NaN).")
        if own != rate:
            samples = _import("soxr").resample(samples, own, rate)
        return np.ascontiguousarray(samples, dtype=np.float32)

    def _call(self, function: str, **options: Any) -> Any:
        soundfile = _import("soundfile")
        source = BytesIO(self.source) if isinstance(self.source, bytes) else str(self.source)
        try:
            return getattr(soundfile, function)(source, **options)
        except (soundfile.SoundFileError, OSError) as error:
            reason = str(error).rpartition(": ")[2].rstrip(".")
            raise DataError(
                f"{self.place}: {self.name} cannot be read as audio ({reason}). Convert it to "
                "wav, flac, ogg or mp3."
            ) from None


def open_clip(
    row: Mapping[str, Any], column: str, place: str, folders: Sequence[Path] = ()
) -> Clip:
    """The audio of a row; a relative path begins in the first of the folders that has it."""
    import numpy as np

    value: Any = row.get(column)
    rate = next((row[name] for name in _RATES if row.get(name) is not None), None)
    if isinstance(value, Mapping):
        rate = next((value[name] for name in _RATES if value.get(name) is not None), rate)
        kinds = ("array", "bytes", "path")
        value = next((value[kind] for kind in kinds if value.get(kind) is not None), None)
    if value is None or (isinstance(value, str) and not value):
        raise DataError(f"{place}: there is no audio in {column}.")
    if isinstance(value, bytes):
        return Clip(value, None, place)
    if isinstance(value, (str, Path)):
        return Clip(find_file(Path(value).expanduser(), place, folders, "audio"), None, place)
    try:
        samples = np.asarray(value)
        samples = samples if samples.dtype.kind == "i" else samples.astype(np.float32)
        if not samples.ndim:
            raise ValueError
    except (TypeError, ValueError):
        raise DataError(
            f"{place}: the column {column} must hold paths, bytes or samples, and is "
            f"{value!r:.60} here."
        ) from None
    if not rate:
        raise DataError(
            f"{place}: the samples in {column} have no sampling rate: give "
            f'{{"array": ..., "sampling_rate": 16000}}, or a column sampling_rate.'
        )
    return Clip(samples, int(rate), place)


def _import(package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError:
        raise MissingPackageError(package, "Reading audio", "audio") from None
