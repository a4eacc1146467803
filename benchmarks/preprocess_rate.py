"""`rapidformer preprocess` against the raw rate of the `tokenizers` library on the same cores.

    python benchmarks/preprocess_rate.py [--rounds 3] [--kind gpt2 bert] [--megabytes 30]

The corpus is the standard library's sources as JSON lines, and the vocabulary is trained on it. Raw
is `encode_batch` on texts already in memory, on every core, ignoring the ids; `encode_batch_fast`
skips the offsets. Ours is the full command as a user types it: starting, reading, parsing,
tokenizing, writing, joining. All three alternate, each in its own process, so that other load on
the machine slows all of them. Prints the rates and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

KINDS = {
    "gpt2": ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "vocab.json",
             "--merge-file", "merges.txt"],
    "bert": ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"],
}  # fmt: skip
RAW = ("encode_batch", "encode_batch_fast")


def write_corpus(path: Path, megabytes: float) -> int:
    """Write the sources, one JSON object per line, once or several times; returns the bytes of
    text.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        file.read_text(encoding="utf-8", errors="replace")
        for file in sorted(root.rglob("*.py"))
        if "site-packages" not in file.parts
    ]
    size = 0
    with path.open("w", encoding="utf-8") as output:
        while size < megabytes * 1e6:
            for text in texts:
                output.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                if size >= megabytes * 1e6:
                    break
    return size


def read_texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def train(kind: str, folder: Path, texts: list[str]) -> None:
    """A vocabulary of 16,000 tokens, in the file formats of GPT-2 and BERT."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer() if kind == "gpt2" else BertWordPieceTokenizer()
    special = (
        ["<|endoftext|>"] if kind == "gpt2" else ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    )
    tokenizer.train_from_iterator(
        texts[::4], vocab_size=16_000, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(folder))


def measure_raw(kind: str, function: str, corpus: str) -> float:
    """Seconds of the library alone; runs in its own process."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

    folder = Path(corpus).parent
    tokenizer = (
        ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
        if kind == "gpt2"
        else BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=True)
    )
    texts = read_texts(Path(corpus))
    encode = getattr(tokenizer._tokenizer, function)
    begin = time.perf_counter()
    for start in range(0, len(texts), 500):
        encode(texts[start : start + 500], add_special_tokens=False)
    return time.perf_counter() - begin


def run_raw(kind: str, function: str, corpus: Path) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--raw", kind, function, str(corpus)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "true"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


def run_ours(kind: str, corpus: Path) -> float:
    command = [
        sys.executable, "-m", "rapidformer.cli.main", "preprocess", "--input", corpus.name,
        "--output-prefix", "out", "--overwrite", *KINDS[kind],
    ]  # fmt: skip
    begin = time.perf_counter()
    subprocess.run(command, cwd=corpus.parent, capture_output=True, check=True)
    return time.perf_counter() - begin


def compare(kind: str, megabytes: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        size = write_corpus(corpus, megabytes)
        train(kind, Path(folder), read_texts(corpus))
        seconds: dict[str, list[float]] = {name: [] for name in (*RAW, "preprocess")}
        for _ in range(rounds):
            for name in RAW:
                seconds[name].append(run_raw(kind, name, corpus))
            seconds["preprocess"].append(run_ours(kind, corpus))
    rates = {name: size / statistics.median(times) / 1e6 for name, times in seconds.items()}
    cores = len(os.sched_getaffinity(0))
    print(f"{kind}: {size / 1e6:.1f} MB of text, {cores} cores, median of {rounds}")
    for name, rate in rates.items():
        spread = ", ".join(f"{size / value / 1e6:.2f}" for value in seconds[name])
        ratio = rates["preprocess"] / rate
        note = "" if name == "preprocess" else f"   preprocess / this = {ratio:.2f}"
        print(f"  {name:<18}{rate:6.2f} MB/s ({spread}){note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--megabytes", type=float, default=30.0)
    parser.add_argument("--raw", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.raw:
        print(measure_raw(*options.raw))
        return
    for kind in options.kind:
        compare(kind, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
