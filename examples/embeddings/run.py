"""Search by meaning, from a file of pairs to answers: find the function that a sentence describes.

The data is this machine's Python library: the first sentence of a function's documentation is the
query, its name and arguments are the document that fits. The model starts from random weights.
Each command is printed before it runs, so that it can be copied and changed.

    python examples/embeddings/run.py [--output embeddings-output] [--steps 40]
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from build_data import MODEL, train_tokenizer, write_json, write_lines

QUESTION = "Return the size of a file."
HELD_OUT = 10  # every tenth function
LARGEST = 200_000  # bytes of a source file
TRAINING = (
    "--seq-length", "32", "--global-batch-size", "128", "--micro-batch-size", "128", "--lr", "4e-3",
    "--lr-warmup-fraction", "0.1", "--nproc-per-node", "1", "--log-interval", "20",
)  # fmt: skip


def read_pairs(limit: int | None) -> list[dict[str, str]]:
    """A sentence and the function that it describes; of equal ones, the first."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[str, dict[str, str]] = {}
    paths = sorted([*root.glob("*.py"), *root.glob("*/*.py")])
    random.Random(0).shuffle(paths)
    for path in paths:
        if limit is not None and len(pairs) >= limit:
            break
        is_left_out = {"site-packages", "test", "tests", "idlelib"} & set(path.parts)
        if is_left_out or path.stat().st_size > LARGEST:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            sentence = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if not 20 < len(sentence) < 200 or node.name.startswith("__"):
                continue
            arguments = ", ".join(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
            document = f"{path.stem}: {node.name}({arguments})"
            pairs.setdefault(sentence, {"query": sentence, "document": document})
    return list({pair["document"]: pair for pair in pairs.values()}.values())


def is_held_out(pair: dict[str, str]) -> bool:
    digest = hashlib.sha256(pair["document"].encode()).hexdigest()
    return int(digest[:8], 16) % HELD_OUT == 0


def build(output: Path, limit: int | None) -> list[dict[str, str]]:
    """Write the data and the model's folder; returns the pairs that are not trained on."""
    pairs = read_pairs(limit)
    held_out = [pair for pair in pairs if is_held_out(pair)]
    trained = [pair for pair in pairs if not is_held_out(pair)]
    write_lines(trained, output / "data" / "train.jsonl")
    write_lines(held_out, output / "data" / "validation.jsonl")
    size = train_tokenizer((text for pair in trained for text in pair.values()), output / "model")
    config = {**MODEL, "vocab_size": size, "architectures": ["ModernBertModel"]}
    write_json(config, output / "model" / "config.json")
    print(f"{len(trained):,} pairs to train on, {len(held_out):,} held out, for example")
    print(json.dumps(held_out[0], indent=2))
    return held_out


def run(*words: str) -> None:
    """Print a command and run it."""
    print(f"\n$ rapidformer {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "rapidformer", *words], check=True)


def search(question: str, held_out: list[dict[str, str]], output: Path) -> list[str]:
    """The functions whose vectors have the largest product with the question's."""
    texts = [question, *(pair["document"] for pair in held_out)]
    write_lines(({"text": text} for text in texts), output / "texts.jsonl")
    vectors = output / "vectors.jsonl"
    run(
        "predict", "--load", str(output / "run"), "--input", str(output / "texts.jsonl"),
        "--output", str(vectors),
    )  # fmt: skip
    rows = [json.loads(line) for line in vectors.read_text(encoding="utf-8").splitlines()]
    first, *others = (row["embedding"] for row in rows)
    scores = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [f"{scores[place]:.2f}  {texts[1 + place]}" for place in order[:5]]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("embeddings-output"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, help="read no more files after so many pairs")
    arguments = parser.parse_args(words)
    output = arguments.output
    held_out = build(output, arguments.pairs)
    run(
        "--task", "embedding", "--data-path", str(output / "data"),
        "--pretrained-model-name-or-path", str(output / "model"), "--from-scratch", *TRAINING,
        "--train-iters", str(arguments.steps), "--eval-interval", str(max(1, arguments.steps // 4)),
        "--save", str(output / "run"), "--overwrite",
    )  # fmt: skip
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    scores = [row for row in map(json.loads, lines) if "eval_accuracy@10" in row]
    print(f"\nthe right function is among the first 10 of {len(held_out)}")
    print(f"by chance       {10 / len(held_out):6.1%}")
    for row in scores:
        print(f"after {row['step']:4} steps {row['eval_accuracy@10']:6.1%}")
    best = search(QUESTION, held_out, output)
    print("\n".join(["", QUESTION, *best]))


if __name__ == "__main__":
    main()
