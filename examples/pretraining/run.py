"""Pre-train a GPT on Python's own standard library: corpus, tokenizer, files, black and white box.

Everything comes from this machine. The same training runs twice, as a black box and with the script
gpt.py, and must give the same losses; both are compared with the loss of predicting every token by
its frequency alone (the corpus's unigram entropy). Each command is printed before it runs.

    python examples/pretraining/run.py [--output pretraining-output] [--steps 400] [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from rapidformer.data.indexed import open_indexed

HERE = Path(__file__).parent
END = "<|endoftext|>"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "ensurepip", "lib2to3"}
# About 10 million weights, or a hundred thousand for a quick look.
LARGE = {"vocabulary": 8192, "layers": 4, "hidden": 384, "heads": 6, "length": 256, "files": None}
SMALL = {"vocabulary": 600, "layers": 2, "hidden": 48, "heads": 2, "length": 32, "files": 40}


def write_corpus(path: Path, limit: int | None) -> None:
    """One JSON object per line: the text of each module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(library.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(file.relative_to(library).parts)
    ]
    with path.open("w", encoding="utf-8") as out:
        for file in files[:limit]:
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                out.write(json.dumps({"text": text}) + "\n")


def train_tokenizer(corpus: Path, folder: Path, size: int) -> None:
    """A vocabulary like GPT-2's, trained on this corpus."""
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=size, special_tokens=[END], show_progress=False)
    tokenizer.save_model(str(folder))
    (folder / "vocab.json").rename(folder / "gpt2-vocab.json")
    (folder / "merges.txt").rename(folder / "gpt2-merges.txt")


def measure_unigram_entropy(prefix: Path, fraction: float) -> float:
    """Nats per token of the held-out part, predicted by the token frequencies in the other part."""
    data = open_indexed(prefix)
    cut = round(fraction * len(data))
    seen = np.concatenate(data[:cut])
    held_out = np.concatenate(data[cut : len(data)])
    counts = np.bincount(seen, minlength=int(max(seen.max(), held_out.max())) + 1) + 1.0
    return float(-np.log(counts / counts.sum())[held_out].mean())


def run_command(*words: object) -> float:
    """Print a command, run it and return its duration in seconds."""
    line = [str(word) for word in words]
    print(f"\n$ {shlex.join(line)}\n", flush=True)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which(line[0], path=path) or line[0]
    start = time.perf_counter()
    status = subprocess.run([program, *line[1:]], check=False).returncode
    if status != 0:
        sys.exit(f"the command above failed with status {status}.")
    return time.perf_counter() - start


def read_losses(run: Path) -> tuple[list[float], list[float]]:
    """Training losses by step, and validation losses."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    training = [line["loss"] for line in lines if "loss" in line]
    return training, [line["eval_loss"] for line in lines if "eval_loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("pretraining-output"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    sizes, folder = SMALL if chosen.small else LARGE, chosen.output
    folder.mkdir(parents=True, exist_ok=True)
    corpus, prefix = folder / "corpus.json", folder / "gpt_small"
    write_corpus(corpus, sizes["files"])
    train_tokenizer(corpus, folder, sizes["vocabulary"])
    vocab, merges = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    run_command(
        "rapidformer", "preprocess", "--input", corpus, "--output-prefix", prefix,
        "--vocab", vocab, "--dataset-impl", "mmap", "--tokenizer-type", "GPT2BPETokenizer",
        "--merge-file", merges, "--append-eod", "--overwrite",
    )  # fmt: skip
    data = Path(f"{prefix}_text_document")
    common = [
        "--num-layers", sizes["layers"], "--hidden-size", sizes["hidden"],
        "--num-attention-heads", sizes["heads"], "--seq-length", sizes["length"],
        "--max-position-embeddings", sizes["length"], "--micro-batch-size", 8,
        "--global-batch-size", 8, "--train-iters", chosen.steps, "--data-path", data,
        "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges,
        "--data-impl", "mmap", "--split", "950,50", "--lr", "1e-3", "--lr-decay-style", "cosine",
        "--min-lr", "1e-4", "--lr-warmup-fraction", ".05", "--weight-decay", "1e-2",
        "--clip-grad", "1.0", "--hidden-dropout", 0, "--attention-dropout", 0,
        "--log-interval", 10, "--eval-interval", max(chosen.steps // 4, 1), "--eval-iters", 20,
        "--overwrite",
    ]  # fmt: skip
    black, white = folder / "black-box", folder / "white-box"
    seconds = run_command(
        "rapidformer", "--task", "pretraining", "--model-type", "gpt", *common, "--save", black
    )
    run_command("rapidformer", "--user-script", HERE / "gpt.py", *common, "--save", white)
    losses, validation = read_losses(black)
    others, other_validation = read_losses(white)
    entropy = measure_unigram_entropy(data, 0.95)
    pairs = zip([*losses, *validation], [*others, *other_validation], strict=True)
    print(f"\nunigram entropy of the held-out part   {entropy:.4f} nats a token")
    print(f"validation loss, black box              {', '.join(f'{x:.4f}' for x in validation)}")
    print(f"largest difference between the two runs  {max(abs(a - b) for a, b in pairs):.2e}")
    print(f"black box: {chosen.steps} updates in {seconds:.0f} s")


if __name__ == "__main__":
    main()
