"""The cost of a large corpus's index maps: time and peak memory, each case in its own process.

    python benchmarks/index_maps.py [--documents 10000000] [--tokens-per-document 1000]

GPT: create an ``.idx`` of that many documents (its ``.bin`` is a sparse file), compute the three
maps, build them through the cache as training does (hash of the ``.idx``, maps, ``.npy`` files on
disk), and load them from there. BERT: the sentence map of a tenth as many documents, of 1 to 39
sentences each. Blend: the order of ten million samples from three datasets, compared with a plain
loop.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SEED = 1234


def write_index(prefix: Path, documents: int, mean: int) -> None:
    """An ``.idx`` of random lengths, and a ``.bin`` of matching size."""
    sizes = np.random.default_rng(SEED).integers(1, 2 * mean, documents).astype("<i4")
    ends = np.cumsum(sizes, dtype=np.int64) * 2
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        file.write(sizes.tobytes())
        file.write((ends - sizes * np.int64(2)).astype("<i8").tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(ends[-1]))


def get_peak_gib() -> float:
    # Not getrusage: its peak includes the memory of the parent process.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def run_arithmetic(prefix: Path, seq_length: int) -> None:
    from rapidformer.data.indexed import open_indexed
    from rapidformer.data.pretraining.gpt import build_gpt_index

    sizes = open_indexed(prefix).sizes
    start = time.perf_counter()
    index = build_gpt_index(
        sizes, start=0, stop=len(sizes), num_samples=None, seq_length=seq_length, seed=SEED
    )
    seconds = time.perf_counter() - start
    show(f"GPT {seq_length}, arithmetic", len(index["shuffle"]), seconds)


def run_through_cache(prefix: Path, seq_length: int) -> None:
    from rapidformer.data.pretraining import build_train_valid_test_datasets

    for what in ("built and saved", "from the cache"):
        start = time.perf_counter()
        train, _, _ = build_train_valid_test_datasets(
            [str(prefix)], "mmap", "1", [None, 0, 0], seq_length, SEED, True
        )
        show(f"GPT {seq_length}, {what}", len(train), time.perf_counter() - start)


def run_bert(prefix: Path, short_percent: int) -> None:
    from rapidformer.data.pretraining.sentence_map import build_sentence_map

    documents = int(prefix.name.split("-")[1]) // 10
    random = np.random.default_rng(SEED)
    doc_idx = np.append(0, np.cumsum(random.integers(1, 40, documents)))
    sizes = random.integers(5, 46, int(doc_idx[-1])).astype(np.int32)
    start = time.perf_counter()
    rows = build_sentence_map(
        doc_idx,
        sizes,
        num_samples=None,
        max_length=509,
        short_seq_prob=short_percent / 100,
        min_sentences=2,
        seed=SEED,
    )
    show(f"BERT 512, short {short_percent} %", len(rows), time.perf_counter() - start)


def run_blend(prefix: Path, sets: int) -> None:
    from rapidformer.data.pretraining import blend

    weights = np.arange(1.0, sets + 1) / np.arange(1.0, sets + 1).sum()
    start = time.perf_counter()
    blend.build_blend_index(weights.tolist(), 10_000_000)
    show(f"blend of {sets}", 10_000_000, time.perf_counter() - start)
    start = time.perf_counter()
    blend._choose_one_by_one(weights, 0, 200_000, np.zeros(sets))
    show(f"blend of {sets}, plain loop", 200_000, time.perf_counter() - start)


CASES = {
    "arithmetic": (run_arithmetic, (2048, 1024)),
    "cache": (run_through_cache, (2048, 1024)),
    "bert": (run_bert, (10, 0)),
    "blend": (run_blend, (3, 20)),
}


def show(what: str, samples: int, seconds: float) -> None:
    rate = samples / seconds / 1e6
    print(f"{what:32} {samples:>12,} {seconds:9.2f} s {rate:8.2f} M/s {get_peak_gib():7.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens-per-document", type=int, default=1000)
    parser.add_argument("--folder", help="where to create the files (default: a temporary folder)")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        name, prefix, setting = args.case
        CASES[name][0](Path(prefix), int(setting))
        return
    print(f"{args.documents:,} documents of {args.tokens_per_document} tokens on average\n")
    print(f"{'case':32} {'samples':>12} {'time':>11} {'rate':>12} {'peak memory':>11}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        prefix = Path(folder) / f"corpus-{args.documents}"
        write_index(prefix, args.documents, args.tokens_per_document)
        for name, (_, settings) in CASES.items():
            for setting in settings:
                command = [sys.executable, __file__, "--case", name, str(prefix), str(setting)]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
