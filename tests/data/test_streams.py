"""Streams: every format, from any row on; the same rows after a kill, whatever the layout."""

from __future__ import annotations

import csv
import gc
import gzip
import io
import json
import resource
import tarfile
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import rapidformer.data.streams.reader as reader
from rapidformer.data.adopting import adopt_loader
from rapidformer.data.files import load_file
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.mixture import MixedStream, choose_sets
from rapidformer.data.streams.listing import open_stream
from rapidformer.data.streams.stream import StreamRows
from rapidformer.errors import DataError

Rows = list[dict[str, Any]]
State = dict[str, Any]


def make_rows(count: int, first: int = 0) -> Rows:
    return [{"n": n, "text": 'é\n,"' * (n % 3) + f"w{n}"} for n in range(first, first + count)]


def write_lines(path: Path, rows: Rows) -> None:
    lines = "".join(json.dumps(row) + "\n" + "\n" * (row["n"] % 5 == 0) for row in rows)
    content = lines.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_zstd(path: Path, rows: Rows) -> None:
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))


def write_table(path: Path, rows: Rows) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["n", "text"])
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: Rows) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


def write_arrow(path: Path, rows: Rows, *, as_stream: bool = False) -> None:
    table = pyarrow.Table.from_pylist(rows)
    start = pyarrow.ipc.new_stream if as_stream else pyarrow.ipc.new_file
    with start(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=7)


def write_stream(path: Path, rows: Rows) -> None:
    write_arrow(path, rows, as_stream=True)


def write_tar(path: Path, rows: Rows) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for row in rows:
            for ending, text in (("json", json.dumps({"n": row["n"]})), ("txt", row["text"])):
                info = tarfile.TarInfo(f"a.b/{row['n']:05d}.{ending}")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))


FORMATS: dict[str, Callable[[Path, Rows], None]] = {
    "a.jsonl": write_lines, "b.jsonl.gz": write_lines, "c.jsonl.zst": write_zstd,
    "d.csv": write_table, "e.parquet": write_parquet, "f.arrow": write_arrow,
    "g.arrow": write_stream, "h.tar": write_tar, "i.tgz": write_tar,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_any_row_on(name: str, tmp_path: Path) -> None:
    rows = make_rows(25)
    FORMATS[name](tmp_path / name, rows)
    stream = open_stream(tmp_path / name)
    assert [{"n": row["n"], "text": row["text"]} for row in stream] == rows
    shard = stream.shards[0]
    items = list(shard.read(0, 0))
    for place in (0, 6, 7, 19, 24):
        number, _, offset = items[place]
        assert list(shard.read(number, offset)) == items[place + 1 :]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("indented.txt", b"\xef\xbb\xbf  two blanks\n\n\ttab, blanks at the end  \r\nlast"),
        ("twice.csv", b"text,text\na,b\nc,d\n"),
        ("blanks.csv", b"label,score\n 1, 0.5\n 0,-inf\n"),
        ("words.csv", b"text,score\na,nan\nb,1.5\n"),
        ("returns.txt", b"one\rtwo\r\nthree\r\rfour\r"),
        ("returns.jsonl", b'{"text":\r"one"}\r\n{"text": "two"}'),
        ("index.csv", b",text\n0,a\n1,b\n"),
        ("tabs.csv", b"label,text\n\t1,\ta\n0\t,b\n"),
    ],
)
def test_a_stream_has_the_rows_of_the_table(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    table = load_file(tmp_path / name, str(tmp_path / "cache"))
    assert list(open_stream(tmp_path / name)) == list(table)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of different formats and sizes, with 1,490 rows."""
    first = 0
    for count, (name, write) in zip(
        (400, 30, 250, 60, 210, 90, 5, 440, 5), FORMATS.items(), strict=True
    ):
        write(tmp_path / name, make_rows(count, first))
        first += count
    return tmp_path


def collate(rows: Rows) -> dict[str, torch.Tensor]:
    return {"n": torch.tensor([row["n"] for row in rows])}


def expand(stream: StreamRows) -> StreamRows:
    """Rows become none, one or two samples."""
    return stream.then(lambda rows, _: [r for r in rows for _ in range(r["n"] % 3)], expands=True)


def read(
    stream: StreamRows, ranks: int = 1, workers: int = 0, *, batch: int = 10,
    state: State | None = None, stop: int | None = None, **options: Any,
) -> tuple[list[int], State]:  # fmt: skip
    """The rows that all ranks get together, and the position after ``stop`` rounds."""
    parts: list[list[list[int]]] = []
    for rank in range(ranks):
        loader = DistributedLoader(
            stream, collate=collate, micro_batch_size=batch, num_replicas=ranks, replica=rank,
            num_workers=workers if rank < 1 else 0, seed=5, **options,
        )  # fmt: skip
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        mine = []
        for count, taken in enumerate(loader.iterate_micro_batches(), 1):
            mine.append([] if taken.is_filler else taken.batch["n"].tolist())
            if count == stop:
                break
        parts.append(mine)
    return [n for each in zip(*parts, strict=True) for p in each for n in p], loader.state_dict()


@pytest.mark.parametrize("prepare", [lambda stream: stream, expand], ids=["rows", "expanded"])
def test_the_rows_after_a_kill_are_those_of_an_unbroken_run(folder: Path, prepare: Any) -> None:
    stream = prepare(open_stream(folder, shuffle_buffer=100))
    whole, _ = read(stream)
    if prepare is expand:
        assert sorted(whole) == sorted(n for n in range(1490) for _ in range(n % 3))
    else:
        assert sorted(whole) == list(range(1490)) and whole != list(range(1490))
    first, state = read(stream, 2, stop=25)
    assert first == whole[: len(first)]
    for ranks, workers, batch in ((4, 2, 10), (1, 0, 10), (3, 0, 7)):
        rest, _ = read(stream, ranks, workers, batch=batch, state=state)
        assert first + rest == whole, (ranks, workers, batch)
    # Killed a second time, elsewhere.
    more, state = read(stream, 4, state=state, stop=7)
    rest, _ = read(stream, state=state)
    assert first + more + rest == whole


def test_epochs_and_seeds_have_orders_of_their_own(folder: Path) -> None:
    stream = open_stream(folder, shuffle_buffer=50)
    loader = DistributedLoader(stream, collate=collate, micro_batch_size=149, seed=5)
    passes = [[n for batch in loader for n in batch["n"].tolist()] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]
    other = DistributedLoader(stream, collate=collate, micro_batch_size=149, seed=6)
    assert [n for batch in other for n in batch["n"].tolist()] != passes[0]
    assert read(open_stream(folder))[0] == list(range(1490))


def test_a_token_budget_takes_the_same_rows(folder: Path) -> None:
    def encode(rows: Rows, _: list[int]) -> Rows:
        return [{"n": row["n"], "input_ids": [1] * (row["n"] % 9 + 1)} for row in rows]

    stream = open_stream(folder, shuffle_buffer=50).then(encode, expands=False)
    budget: Any = {"token_budget": 30, "rounds_per_update": 2}
    whole, _ = read(stream, **budget)
    _, state = read(stream, **budget, stop=9)
    rest, _ = read(stream, state=state, **budget)
    assert sorted(whole) == list(range(1490)) and whole[-len(rest) :] == rest
    assert state["consumed_samples"] + len(rest) == 1490


def test_resuming_reads_one_window_and_not_what_is_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in range(4):
        write_lines(tmp_path / f"{shard}.jsonl", make_rows(500, 500 * shard))
    stream = open_stream(tmp_path, shuffle_buffer=64)
    whole, _ = read(stream)
    first, state = read(stream, stop=160)
    assert len(json.dumps(state)) < 300
    seen: list[int] = []
    monkeypatch.setattr(reader, "measure", lambda value: seen.append(1) or 0)
    rest, _ = read(stream, state=state)
    assert first + rest == whole and len(seen) <= len(rest) + 64


def test_other_shards_are_counted_from_the_start(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", make_rows(50))
    _, state = read(open_stream(tmp_path), stop=2)
    write_lines(tmp_path / "b.jsonl", make_rows(10, 50))
    assert read(open_stream(tmp_path), state=state)[0] == list(range(20, 60))


def test_windows_hold_few_large_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", make_rows(100))
    monkeypatch.setattr(reader, "_WINDOW_BYTES", 200)
    order, _ = read(open_stream(tmp_path, shuffle_buffer=10_000))
    assert sorted(order) == list(range(100)) and order != list(range(100))
    assert max(abs(n - place) for place, n in enumerate(order)) < 20


def test_several_sets_by_the_number_of_the_row(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", make_rows(30))
    write_lines(tmp_path / "b.jsonl", make_rows(500, 1000))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    stream = open_stream(paths, shuffle_buffer=16, weights=[3, 1])
    whole, _ = read(stream, stop=120)
    share = sum(n < 1000 for n in whole) / len(whole)
    assert 0.7 < share < 0.8
    assert {n for n in whole if n < 1000} == set(range(30)), "the small set begins again"
    assert [n >= 1000 for n in whole] == list(choose_sets([3, 1], 5, 0, len(whole)))
    with pytest.raises(DataError, match="1 weights for 2 data sets"):
        open_stream(paths, weights=[1])


@pytest.mark.parametrize("case", ["rows", "expanded", "token budget"])
def test_sets_with_columns_of_their_own_after_a_kill(tmp_path: Path, case: str) -> None:
    """Each set has its own steps; the small one begins again and again."""

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        return {"n": row["number"], "input_ids": [1] * (row["number"] % 9 + 1)}

    lines = "".join(json.dumps({"number": n}) + "\n" for n in range(1000, 1030))
    (tmp_path / "b.jsonl").write_text(lines)
    write_lines(tmp_path / "a.jsonl", make_rows(500))
    parts = [open_stream(tmp_path / name, shuffle_buffer=16) for name in ("a.jsonl", "b.jsonl")]
    if case == "expanded":
        parts[0] = expand(parts[0])
    given = parts[0].map(lambda row: {"n": row["n"], "input_ids": [1]})
    stream = MixedStream({"a": given, "b": parts[1].map(rename)}, [3, 1])
    options: Any = {"token_budget": 40} if case == "token budget" else {}
    before, after, rounds = (1, 1, 80) if options else (2, 4, 10)
    whole, _ = read(stream, stop=120, **options)
    assert sorted({n for n in whole if n >= 1000}) == list(range(1000, 1030))
    if case != "token budget":  # which orders the samples of an update by length
        chosen = choose_sets([3, 1], 5, 0, len(whole)).tolist()
        assert [int(n >= 1000) for n in whole] == chosen
    first, state = read(stream, before, stop=40, **options)
    rest, _ = read(stream, after, 3, state=state, stop=rounds, **options)
    assert first + rest == whole[: len(first) + len(rest)] and len(rest) > 90
    sets = [batch.sets for batch, _ in zip(
        DistributedLoader(
            stream, collate=collate, micro_batch_size=10, seed=5, tells_sets=True
        ).iterate_micro_batches(), range(3), strict=False,
    )]  # fmt: skip
    assert [s for each in sets for s in each] == choose_sets([3, 1], 5, 0, 30).tolist()


def test_workers_of_a_pass_that_is_left_end_at_once(tmp_path: Path) -> None:
    """Not when the garbage collector comes by, which waited for each of them in vain."""
    write_lines(tmp_path / "a.jsonl", make_rows(500))
    part = expand(open_stream(tmp_path / "a.jsonl"))
    gc.disable()
    try:
        for stream in (part, MixedStream({"a": part, "b": part}, [1, 1])):
            before = set(active_children())
            read(stream, workers=2, stop=3)
            assert set(active_children()) <= before
    finally:
        gc.enable()


def test_hugging_face_streams_lose_no_rows() -> None:
    """The reproducers of huggingface/datasets #7538 and #7901, on our stream."""
    from datasets import Dataset

    plain = Dataset.from_dict({"n": list(range(24))}).to_iterable_dataset(num_shards=4)
    stream = open_stream(plain)
    assert len(stream.shards) == 4
    whole, _ = read(stream, batch=1)
    assert whole == list(range(24))
    for stop in range(1, 23, 3):  # also in the middle of a batch of the shard
        first, state = read(stream, batch=1, stop=stop)
        assert first + read(stream, batch=1, state=state)[0] == whole

    shuffled = Dataset.from_dict({"n": list(range(12))}).to_iterable_dataset(num_shards=1)
    for stream in (open_stream(shuffled.shuffle(seed=42)), open_stream(shuffled, shuffle_buffer=5)):
        whole, _ = read(stream, batch=1)
        assert sorted(whole) == list(range(12)) and whole != list(range(12))
        for stop in range(1, 12, 2):
            first, state = read(stream, batch=1, stop=stop)
            assert first + read(stream, batch=1, state=state)[0] == whole


def test_torch_and_plain_iterables(tmp_path: Path) -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from make_rows(10)

    assert read(open_stream(Numbers()))[0] == list(range(10))
    write_lines(tmp_path / "a.jsonl", make_rows(10))
    given = DataLoader(open_stream(tmp_path), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
    assert [n for batch in given for n in batch["n"].tolist()] == list(range(10))
    adopted = adopt_loader(given, num_replicas=1, replica=0)
    assert [n for batch in adopted for n in batch["n"].tolist()] == list(range(10))
    assert adopted.state_dict()["epoch"] == 1


def test_webdataset_columns(tmp_path: Path) -> None:
    files = {
        "x/1.jpg": b"picture", "x/1.cls": b"3", "x/1.left.png": b"other", "x/2.wav": b"sound",
        "x/2.json": b'{"text": "hello", "n": 1}', "x/2.meta.json": b"[1]", "x/2.npy": b"array",
    }  # fmt: skip
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert list(open_stream(tmp_path / "a.tar")) == [
        {
            "__key__": "x/1", "image": {"bytes": b"picture", "path": "x/1.jpg"}, "label": 3,
            "left": {"bytes": b"other", "path": "x/1.left.png"},
        },
        {
            "__key__": "x/2", "audio": {"bytes": b"sound", "path": "x/2.wav"}, "text": "hello",
            "n": 1, "meta": [1], "npy": b"array",
        },
    ]  # fmt: skip


def test_bad_rows_are_named_by_file_and_row(tmp_path: Path) -> None:
    def fail(name: str, content: str | bytes, workers: int = 0) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(DataError) as caught:
            read(open_stream(path), workers=workers, batch=200)
        text = str(caught.value)
        assert "\n" not in text and text.startswith(str(path)), text
        return text.removeprefix(str(path))

    lines = [json.dumps(row) for row in make_rows(10_100)]
    lines[9_999] = '{"n": 9999, "text": 5}'
    assert fail("a.jsonl", "\n".join(lines), workers=1) == (
        ", row 10000: the column text holds '5' (int), but 'w0' (str) before: a column must hold "
        "one type."
    )
    lines[9_999] = '{"n": 9999, "text": '
    assert ", row 10000: not valid JSON (Expecting value" in fail("b.jsonl", "\n".join(lines))
    assert ", row 1: each line must be a JSON object" in fail("c.jsonl", '[{"n": 1}]\n')
    table = "n,text\n" + "".join(f"{n},a\n" for n in range(1200))
    assert ", row 1201: the column n holds 'x', but int before" in fail("d.csv", table + "x,a\n")
    assert fail("e.csv", table + "1,a,b\n") == ", row 1201: 3 cells for 2 columns."
    packed = gzip.compress("\n".join(json.dumps(row) for row in make_rows(3000)).encode())
    assert "cannot be read: Compressed file ended" in fail("f.jsonl.gz", packed[:-100])
    write_tar(tmp_path / "whole.tar", make_rows(20))
    cut = (tmp_path / "whole.tar").read_bytes()[:18_000]
    assert ", row 9: cannot be read: unexpected end of data" in fail("g.tar", cut)
    assert "\xff" not in fail("h.jsonl", b'{"n": 1, "text": "\xff"}\n')
    (tmp_path / "i.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"i\.jsonl: the stream holds no rows"):
        _ = open_stream(tmp_path / "i.jsonl").head


def test_a_shard_that_vanishes(folder: Path) -> None:
    stream = open_stream(folder)
    (folder / "h.tar").unlink()
    with pytest.raises(DataError, match=r"h\.tar: this shard of the stream is missing"):
        read(stream)


def test_nodes_with_different_files(folder: Path) -> None:
    others = ["other"]
    with pytest.raises(DataError, match="the processes see different shards of 9 shards"):
        read(open_stream(folder), gather_digests=lambda mine: [mine, *others])


def test_paths_that_cannot_be_streamed(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"")
    for text, problem in {
        "none.jsonl": "no such file or folder", "*.tar": "no file that can be streamed matches",
        "": "the folder holds no file that can be streamed", "a.docx": "cannot be streamed: use",
    }.items():  # fmt: skip
        with pytest.raises(DataError, match=problem):
            open_stream(tmp_path / text)


def test_memory_does_not_grow_with_what_is_read(tmp_path: Path) -> None:
    """The small form of ``benchmarks/stream_memory.py``: 160 MB through windows of 2 MB."""
    row = {"n": 1, "text": "w " * 10_000}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 100)
    stream = open_stream([tmp_path / "a.jsonl"] * 80, shuffle_buffer=100)
    loader = DistributedLoader(stream, collate=collate, micro_batch_size=1, num_replicas=40)
    sizes = []
    for _ in loader:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * resource.getpagesize() / 2**20)
    assert len(sizes) == 200 and max(sizes) - sizes[50] < 16
