"""Streams of conversations about images: the batches of a table, left-out rows, bad pictures."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import DataError
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.registry import get_task

from .conftest import make_args, write_jsonl
from .image_text_rig import COLOURS, build_image, build_model, save_family


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llava", tmp_path_factory.mktemp("image_text"))


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows about pictures beside them; the third has none."""
    result = []
    for number, colour in enumerate([*COLOURS, "red"]):
        build_image(colour).save(tmp_path / f"{number}.png")
        turns = [{"role": "user", "content": "what colour ?"},
                 {"role": "assistant", "content": colour}]  # fmt: skip
        images = [] if number == 2 else [f"{number}.png"]
        result.append({"messages": turns, "images": images})
    return result


def _prepare(model_folder: Path, path: Any, **settings: Any) -> PreparedData:
    args = make_args(
        task="image_text", pretrained_model_name_or_path=model_folder, data_path=path,
        dataloader_type="single", **{"streaming": True, "seq_length": 24, **settings},
    )  # fmt: skip
    return get_task("image_text").prepare(args)


def _collect(prepared: PreparedData, num_workers: int = 0) -> list[Any]:
    loader = DistributedLoader(
        prepared.train, collate=prepared.collate, micro_batch_size=1, num_workers=num_workers
    )
    return [micro_batch.batch for micro_batch in loader.iterate_micro_batches()]


def _write_tar(path: Path, rows: list[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(rows):
            files = {"json": json.dumps({"messages": row["messages"]}).encode()}
            if row["images"]:
                files["png"] = (path.parent / row["images"][0]).read_bytes()
            for ending, content in files.items():
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    stored = [
        {**row, "images": [{"bytes": (path.parent / name).read_bytes()} for name in row["images"]]}
        for row in rows
    ]
    datasets.Dataset.from_list(stored).to_parquet(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_a_stream_has_the_batches_of_a_table(
    kind: str, model_folder: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    write = {"jsonl": write_jsonl, "parquet": _write_parquet, "tar": _write_tar}[kind]
    write(tmp_path / f"train.{kind}", rows)
    table = write_jsonl(tmp_path / "rows.jsonl", rows)
    expected = _collect(_prepare(model_folder, table, streaming=False))
    batches = _collect(_prepare(model_folder, tmp_path / f"train.{kind}"), num_workers=1)
    assert len(batches) == len(expected) == 4
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[name], other[name]) for name in batch)


def test_pictures_are_looked_for_beside_their_own_file(
    model_folder: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        build_image(colour).save(tmp_path / name / "0.png")
        write_jsonl(tmp_path / name / "train.jsonl", rows[:1])
    samples = list(_prepare(model_folder, str(tmp_path / "*" / "train.jsonl")).train)
    found = [sample["images"][0].getpixel((8, 8)) for sample in samples]
    assert found == [build_image(colour).getpixel((8, 8)) for colour in ("red", "blue")]


@pytest.mark.parametrize("trains_on_prompts", [False, True])
def test_a_row_that_is_left_out_adds_nothing(
    trains_on_prompts: bool,
    model_folder: Path,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows[1]["messages"][0]["content"] = "what " * 30
    path = write_jsonl(tmp_path / "train.jsonl", rows[:2])
    prepared = _prepare(model_folder, path, train_on_prompts=trains_on_prompts)
    good, left_out = list(prepared.train)
    reason = "longer than 24 tokens with the images"
    assert f"{path}, row 2: nothing is learnt from this row: {reason}" in caplog.text
    alone, both = prepared.collate([good]), prepared.collate([left_out, good])
    assert set(both["labels"][0].tolist()) == {-100}
    model = build_model("llava").eval()
    torch.testing.assert_close(model(**both).loss, model(**alone).loss)


def test_bad_rows_are_named_with_their_file(
    model_folder: Path, tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rapidformer.data.streams.stream._HEAD_ROWS", 2)
    (tmp_path / "broken.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])
    for images, message in (
        (["broken.png"], "broken.png cannot be read as an image"),
        (["no.png"], "there is no image file no.png"),
        ([7], "an image must be a path"),
    ):
        path = write_jsonl(tmp_path / "train.jsonl", [*rows[:2], {**rows[2], "images": images}])
        with pytest.raises(DataError, match=rf"train\.jsonl, row 3: {message}"):
            list(_prepare(model_folder, path).train)


def test_a_look_at_the_first_rows_opens_their_pictures_alone(
    model_folder: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    picture = tmp_path / "1.png"
    picture.write_bytes(picture.read_bytes()[:60])  # its size can be read, but not its pixels
    stream = _prepare(model_folder, write_jsonl(tmp_path / "train.jsonl", rows)).train
    assert [sample["images"][0].size for sample in stream.peek(1)] == [(20, 16)]
    with pytest.raises(DataError, match=r"train\.jsonl, row 2: 1\.png cannot be read"):
        stream.peek(2)
