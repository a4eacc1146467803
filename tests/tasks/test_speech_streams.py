"""Recordings of a stream: the samples of a table; what cannot be learnt has no labels."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
import torch

from rapidformer.errors import ConfigurationError, DataError
from rapidformer.tasks.registry import get_task

from .conftest import make_args, write_jsonl
from .speech_rig import RATE, make_ctc_model, make_rows, make_whisper
from .test_stream_rows import collect

RECOGNITION = get_task("speech_recognition")
CLASSIFICATION = get_task("audio_classification")


@pytest.fixture(scope="module")
def ctc_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, which a stream needs."""
    folder = make_ctc_model(tmp_path_factory.mktemp("ctc"), mask_time_prob=0.0)
    args = make_args(pretrained_model_name_or_path=folder)
    RECOGNITION.prepare(args, {"train": make_rows(6)}).saved.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


def write_data(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """Recordings as files beside their list, in a parquet file, or in an archive."""
    clips = []
    for row in rows:
        file = io.BytesIO()
        soundfile.write(file, row["audio"]["array"], RATE, format="flac")
        clips.append(file.getvalue())
    labels = [row["text"].split()[0] for row in rows]
    if kind == "jsonl":
        (folder / "clips").mkdir()
        for number, clip in enumerate(clips):
            (folder / "clips" / f"{number}.flac").write_bytes(clip)
        listed = [
            {"audio": f"clips/{number}.flac", "text": row["text"], "label": label}
            for number, (row, label) in enumerate(zip(rows, labels, strict=True))
        ]
        return str(write_jsonl(folder / "train.jsonl", listed))
    if kind == "parquet":
        audio = [{"path": None, "bytes": clip} for clip in clips]
        cells = {"audio": audio, "text": [row["text"] for row in rows], "label": labels}
        pyarrow.parquet.write_table(pyarrow.table(cells), folder / "train.parquet")
        return str(folder / "train.parquet")
    with tarfile.open(folder / "train.tar", "w") as archive:
        for number, (row, clip, label) in enumerate(zip(rows, clips, labels, strict=True)):
            files = {"flac": clip, "txt": row["text"].encode(), "cls": label.encode()}
            for ending, content in files.items():
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return str(folder / "train.tar")


def prepare(task: Any, folder: Path, data: str, **settings: Any) -> Any:
    args = make_args(
        pretrained_model_name_or_path=folder, data_path=data, dataloader_type="single",
        streaming=True, **settings,
    )  # fmt: skip
    return task.prepare(args)


def is_same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_samples_are_those_of_a_table(
    kind: str, ctc_folder: Path, whisper_folder: Path, tmp_path: Path
) -> None:
    rows = make_rows(5)
    data = write_data(tmp_path, kind, rows)
    decoded = [
        {**row, "audio": {**row["audio"], "array": _as_stored(row["audio"]["array"])}}
        for row in rows
    ]
    labelled = [{"audio": row["audio"], "label": row["text"].split()[0]} for row in decoded]
    for task, folder, table, settings in (
        (RECOGNITION, ctc_folder, decoded, {}),
        (RECOGNITION, whisper_folder, decoded, {"language": "de"}),
        (CLASSIFICATION, ctc_folder, labelled, {"label_names": ["high", "low", "mid"]}),
    ):
        args = make_args(pretrained_model_name_or_path=folder, **settings)
        expected = task.prepare(args, {"train": table})
        stream = prepare(task, folder, data, **settings)
        assert stream.model_settings == expected.model_settings
        found = collect(stream)
        assert len(found) == 5
        assert all(is_same(row, expected.train[n]) for n, row in enumerate(found))


def _as_stored(samples: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="flac")
    file.seek(0)
    stored: np.ndarray = soundfile.read(file, dtype="float32")[0]
    return stored


@pytest.mark.parametrize("kind", ["ctc", "whisper", "classes"])
def test_what_cannot_be_learnt_has_no_labels(
    kind: str, ctc_folder: Path, whisper_folder: Path, tmp_path: Path, caplog: Any
) -> None:
    """The loss and the gradient are those of the other rows, also where there are none."""
    folder, settings = (
        (whisper_folder, {"language": "de"}) if kind == "whisper" else (ctc_folder, {})
    )
    task = CLASSIFICATION if kind == "classes" else RECOGNITION
    rows = make_rows(3)
    rows[1]["audio"]["array"] = np.resize(rows[1]["audio"]["array"], 3 * RATE)
    data = write_data(tmp_path, "jsonl", rows)
    prepared = prepare(task, folder, data, max_audio_seconds=1.0, **settings)
    found = collect(prepared)
    place = f"{tmp_path / 'train.jsonl'}, row 2: nothing is learnt from this row: longer than 1 s."
    assert caplog.text.count("nothing is learnt") == 1 and place in caplog.text
    args = make_args(pretrained_model_name_or_path=folder, **settings)
    model = task.build_model(args, prepared).train()

    def learn(chosen: list[int]) -> tuple[Any, list[torch.Tensor]]:
        batch = prepared.collate([found[number] for number in chosen])
        terms = prepared.objective.compute(model, batch, None)
        model.zero_grad()
        terms["loss"].mean.nan_to_num().backward()
        return terms, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (terms, gradients), (others, expected) = learn([0, 1, 2]), learn([0, 2])
    assert terms["left_out"].mean.item() == pytest.approx(1 / 3)
    assert terms["loss"].mean.item() == pytest.approx(others["loss"].mean.item(), rel=1e-6)
    for one, other in zip(gradients, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    alone, gradients = learn([1])
    assert not any(gradient.any() for gradient in gradients)
    assert alone["loss"].count is None or float(alone["loss"].count) == 0


def test_an_iterable_data_set_is_not_decoded_by_itself(ctc_folder: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path, "parquet", make_rows(3))
    table = datasets.Dataset.from_parquet(data, cache_dir=str(tmp_path))
    declared = table.cast_column("audio", datasets.Audio()).to_iterable_dataset()
    args = make_args(pretrained_model_name_or_path=ctc_folder, dataloader_type="single")
    found = collect(RECOGNITION.prepare(args, {"train": declared}))
    expected = collect(prepare(RECOGNITION, ctc_folder, data))
    assert len(found) == 3 and all(map(is_same, found, expected))


def test_what_stops_a_stream(ctc_folder: Path, tmp_path: Path) -> None:
    rows = make_rows(2)
    rows[1]["text"] = "low q"
    data = write_data(tmp_path, "jsonl", rows)
    with pytest.raises(DataError, match=r"train\.jsonl, row 2: the tokenizer does not know 'q'\."):
        collect(prepare(RECOGNITION, ctc_folder, data))
    (tmp_path / "clips" / "1.flac").write_text("no recording")
    with pytest.raises(DataError, match=r"train\.jsonl, row 2: .*1\.flac cannot be read as audio"):
        collect(prepare(CLASSIFICATION, ctc_folder, data))
    bare = make_ctc_model(tmp_path / "bare")
    with pytest.raises(ConfigurationError, match="--streaming: the model has no tokenizer"):
        prepare(RECOGNITION, bare, data)
