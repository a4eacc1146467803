"""Resident memory of a process that reads a stream: it must not grow with what was read.

    python benchmarks/stream_memory.py --gigabytes 20

Writes one small shard of each format and lists it as often as it takes. What is measured is what
one of 64 ranks does: it reads all rows, shuffles them, decodes and tokenizes its own share, and
keeps the position after every update, as checkpoints do.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from rapidformer.data.loader import DistributedLoader
from rapidformer.data.streams.listing import build_shards
from rapidformer.data.streams.stream import StreamRows

RANKS = 64
ROWS = 2_000
WORDS = 2_800
"""Words of a row, which is about 16 kB."""
PAGE = resource.getpagesize()


def make_rows() -> list[dict[str, Any]]:
    dice = random.Random(0)
    words = [f"w{number}" for number in range(5000)]
    texts = [" ".join(dice.choices(words, k=WORDS)) for _ in range(20)]
    return [{"n": n, "text": texts[n % len(texts)]} for n in range(ROWS)]


def write_shards(folder: Path) -> list[Path]:
    """The same rows in every format that is sought in."""
    rows = make_rows()
    lines, table, archive = (folder / f"a.{kind}" for kind in ("jsonl", "parquet", "tar"))
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), table, row_group_size=500, compression="none"
    )
    with tarfile.open(archive, "w") as file:
        for row in rows:
            content = json.dumps(row).encode()
            info = tarfile.TarInfo(f"{row['n']:06d}.json")
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return [lines, table, archive]


def encode(rows: list[dict[str, Any]], _: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [int(word[1:]) for word in row["text"].split()]} for row in rows]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


def measure_memory() -> float:
    """Megabytes of this process that are resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def run(gigabytes: float, folder: Path, num_workers: int = 0) -> list[tuple[float, float]]:
    """Read so much; returns pairs of gigabytes read and megabytes resident."""
    files = write_shards(folder)
    size = sum(path.stat().st_size for path in files) / 1e9
    copies = max(1, round(gigabytes / size))
    stream = StreamRows(build_shards(files * copies), buffer=10_000)
    loader = DistributedLoader(
        stream.then(encode, expands=False), collate=collate, micro_batch_size=4,
        num_replicas=RANKS, num_workers=num_workers,
    )  # fmt: skip
    total, rows, started = size * copies, ROWS * len(files) * copies, time.monotonic()
    points: list[tuple[float, float]] = []
    for _ in loader:
        loader.state_dict()
        read = total * min(loader.consumed_samples / rows, 1)
        if not points or read - points[-1][0] >= total / 20:
            points.append((read, measure_memory()))
            seconds = time.monotonic() - started
            print(f"{read:6.2f} GB read, {points[-1][1]:7.1f} MB resident, {seconds:6.1f} s")
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        points = run(options.gigabytes, Path(folder), options.num_workers)
    early, late = points[len(points) // 4][1], max(memory for _, memory in points)
    print(f"after a quarter {early:.1f} MB, at most {late:.1f} MB: {late - early:+.1f} MB")


if __name__ == "__main__":
    main()
