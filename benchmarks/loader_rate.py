"""The loader's rate in tokens per second from a warm file: no model, batches stay on the host.

    python benchmarks/loader_rate.py [--tokens 50000000] [--seconds 4]

Writes a corpus of random tokens (documents of about 1000 tokens, and a second one of sentences of
about 25), maps it, warms it up, and reads it in Megatron's sample order with the training loop's
own loader.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from rapidformer.data.collate import PadCollator
from rapidformer.data.indexed import IndexedWriter
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.pretraining import build_train_valid_test_datasets

MICRO_BATCH = 16
WARM_UP_BATCHES = 8


def write_corpus(prefix: Path, num_tokens: int, mean: int) -> None:
    random = np.random.default_rng(1)
    sizes = random.integers(1, 2 * mean, num_tokens // mean).astype(np.int32)
    tokens = random.integers(0, 50_000, int(sizes.sum()), dtype=np.uint16)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_batch(tokens, sizes, np.ones_like(sizes))


def measure(prefix: Path, seq_length: int, num_workers: int, seconds: float) -> float:
    train, _, _ = build_train_valid_test_datasets(
        [str(prefix)], "mmap", "1", [None, 0, 0], seq_length, 1234, False
    )
    loader = DistributedLoader(
        train, collate=PadCollator(), micro_batch_size=MICRO_BATCH, num_workers=num_workers
    )
    start, num_samples, checked = 0.0, 0, 0
    while time.perf_counter() - start < seconds or not start:
        for number, batch in enumerate(loader):
            checked += int(batch["text"][0, 0])  # touched, as a model would
            if not start:
                if number == WARM_UP_BATCHES:
                    start = time.perf_counter()
                continue
            num_samples += len(batch["text"])
            if time.perf_counter() - start > seconds:
                break
    assert checked > 0
    return num_samples * seq_length / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tokens:,} tokens, micro-batches of {MICRO_BATCH}; million tokens per second\n")
    print(f"{'sequences of':16} {'seq length':>10} {'workers 0':>10} {'1':>8} {'2':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for mean in (1000, 25):
            prefix = Path(folder) / f"sequences-of-{mean}"
            write_corpus(prefix, args.tokens, mean)
            for seq_length in (1024, 2048):
                rates = [measure(prefix, seq_length, workers, args.seconds) for workers in range(3)]
                row = " ".join(f"{rate / 1e6:8.2f}" for rate in rates)
                print(f"{f'{mean} tokens':16} {seq_length:>10}   {row}")


if __name__ == "__main__":
    main()
