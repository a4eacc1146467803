"""A run that was stopped goes on: finished parts are kept, others made, the bytes are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer.data.preprocess import PreprocessSettings
from rapidformer.data.preprocess import run as run_module
from rapidformer.data.preprocess.encoding import PartEncoder
from rapidformer.data.preprocess.parts import WorkFolder
from rapidformer.data.preprocess.reading import Part
from rapidformer.errors import DataError
from tests.data.preprocess.rig import build_numbers, read, read_bytes, run, write_json_lines

ROWS = [{"text": f"{i} {i % 7}", "title": str(i)} for i in range(60)]
PART = {"part_bytes": 200}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_json_lines(tmp_path / "in.jsonl", ROWS)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that are made."""
    numbers: list[int] = []
    encode = PartEncoder.encode

    def watch(self: PartEncoder, part: Part) -> Any:
        numbers.append(part.number)
        return encode(self, part)

    monkeypatch.setattr(PartEncoder, "encode", watch)
    return numbers


def _run_until(
    number: int, folder: Path, corpus: Path, error: BaseException, **settings: Any
) -> BaseException:
    with pytest.MonkeyPatch.context() as patch:
        encode = PartEncoder.encode

        def fail(self: PartEncoder, part: Part) -> Any:
            if part.number == number:
                raise error
            return encode(self, part)

        patch.setattr(PartEncoder, "encode", fail)
        with pytest.raises(BaseException) as caught:
            run(folder, corpus, **PART, **settings)
        return caught.value


def test_finished_parts_are_not_made_again(
    tmp_path: Path, corpus: Path, encoded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", corpus, **PART)
    encoded.clear()
    caplog.set_level("INFO", logger="rapidformer")
    stopped = _run_until(3, tmp_path, corpus, KeyboardInterrupt())
    assert isinstance(stopped, KeyboardInterrupt)
    assert "stopped; 3 finished parts stay in" in caplog.text
    assert "the same command continues from there" in caplog.text
    assert not list(tmp_path.glob("out*.bin"))
    encoded.clear()
    summary = run(tmp_path, corpus, **PART)
    assert encoded == list(range(3, whole.parts))
    assert summary.reused_parts == 3
    assert "resuming: 3 finished parts" in caplog.text
    name = "out_text_document"
    assert read_bytes(tmp_path / name) == read_bytes(tmp_path / "whole" / name)
    assert summary.counts == whole.counts
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "in.jsonl", f"{name}.bin", f"{name}.idx",
    ]  # fmt: skip


def test_a_part_in_the_middle_may_be_the_missing_one(
    tmp_path: Path, corpus: Path, encoded: list[int]
) -> None:
    _run_until(6, tmp_path, corpus, KeyboardInterrupt())
    folder = tmp_path / "out_text_document.parts"
    (folder / "00000002.json").unlink()
    bad = folder / "00000004-0.bin"
    bad.write_bytes(bytes(bad.stat().st_size))
    encoded.clear()
    parts = run(tmp_path, corpus, **PART).parts
    assert encoded == [2, 4, *range(6, parts)]
    assert read(tmp_path) == [[[i, i % 7]] for i in range(60)]


def test_rubbish_of_a_killed_worker_is_swept_away(tmp_path: Path, corpus: Path) -> None:
    _run_until(2, tmp_path, corpus, KeyboardInterrupt())
    folder = tmp_path / "out_text_document.parts"
    rubbish = [folder / "4711-2-0.bin", folder / ".4711-2-0.idx.part", folder / "00000009.json"]
    for path in rubbish:
        path.write_text("{")
    _run_until(3, tmp_path, corpus, KeyboardInterrupt())
    assert not any(path.exists() for path in rubbish)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"append_eod": True}, "append_eod was False, is True"),
        ({"max_documents": 50}, "max_documents was None, is 50"),
        ({"tokenizer": build_numbers(900)}, "another tokenizer"),
        ({"part_bytes": 300}, "part size was 200, is 300"),
        ({}, "changed since: in.jsonl"),
    ],
)
def test_parts_of_another_run_are_not_used(
    change: dict[str, Any], told: str, tmp_path: Path, corpus: Path,
    encoded: list[int], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    _run_until(3, tmp_path, corpus, KeyboardInterrupt())
    if not change:
        write_json_lines(corpus, [{"text": "8 8"}, *ROWS])
    encoded.clear()
    summary = run(tmp_path, corpus, **{**PART, **change})
    assert "of another run" in caplog.text
    assert told in caplog.text
    assert (encoded[0], summary.reused_parts) == (0, 0)
    assert read(tmp_path)[-1][0][:2] == ([49, 0] if "max_documents" in change else [59, 3])


def test_workers_may_change_between_runs(tmp_path: Path, corpus: Path) -> None:
    _run_until(3, tmp_path, corpus, KeyboardInterrupt())
    assert run(tmp_path, corpus, **PART, workers=2).reused_parts == 3
    assert read(tmp_path) == [[[i, i % 7]] for i in range(60)]


def test_a_strict_run_sees_the_bad_lines_of_finished_parts(tmp_path: Path) -> None:
    corpus = write_json_lines(tmp_path / "in.jsonl", ["{bad", *ROWS])
    _run_until(3, tmp_path, corpus, KeyboardInterrupt())
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        run(tmp_path, corpus, **PART, strict=True)


def test_a_run_that_was_killed_while_publishing_continues(
    tmp_path: Path, corpus: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two keys has its names already: they are ours, and no reason to refuse."""
    keys = {"json_keys": ("text", "title"), **PART}

    class Dies(run_module.IndexedWriter):
        def finalize(self) -> None:
            if "title" in self.prefix:
                raise KeyboardInterrupt
            super().finalize()

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "IndexedWriter", Dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, corpus, **keys)
    assert (tmp_path / "out_text_document.idx").exists()
    assert not (tmp_path / "out_title_document.bin").exists()
    encoded.clear()
    run(tmp_path, corpus, **keys)
    assert encoded == []
    assert read(tmp_path, "title_document") == [[[i]] for i in range(60)]


def test_two_runs_do_not_share_an_output(tmp_path: Path, corpus: Path) -> None:
    settings = PreprocessSettings(inputs=(str(corpus),), output_prefix=str(tmp_path / "out"))
    other = WorkFolder(settings.get_work_folder())
    other.open({})
    with pytest.raises(DataError, match=r"Another run is writing to .*out_text_document.parts"):
        run(tmp_path, corpus)
    other.close()
    run(tmp_path, corpus)


def test_reports_say_where_a_part_ended(tmp_path: Path, corpus: Path) -> None:
    """What a restart builds on: places in the file, counted in bytes and lines."""
    _run_until(2, tmp_path, corpus, KeyboardInterrupt())
    report = json.loads((tmp_path / "out_text_document.parts/00000001.json").read_text())
    content = corpus.read_bytes()[: report["end"]["offset"]]
    assert content.endswith(b"\n")
    assert content.count(b"\n") == report["end"]["line"]
