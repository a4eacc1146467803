"""The demo behind ``make demo``: train, evaluate and predict with the black-box command.

Everything comes from this machine: the data is Python's own source code (build_data.py), and the
model starts from random weights. Each command is printed before it runs, so that it can be copied
and changed. The number of steps is fixed: it takes less than a minute on two slow cores.

    python examples/demo/run.py [--output demo-output] [--seed 1234] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from build_data import SEED, TOPICS, build_demo, show_summary, write_lines
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

# Marks a folder as the demo's own; the demo replaces runs in no other folder.
MARKER = "made-by-rapidformer-demo.json"
SHAPE = ("--seq-length", "48", "--nproc-per-node", "1")
TRAINING = (
    "--micro-batch-size", "32", "--global-batch-size", "32", "--lr", "3e-3",
    "--lr-decay-style", "linear", "--lr-warmup-fraction", "0.05",
)  # fmt: skip
LENGTH = ("--train-iters", "300", "--eval-interval", "25", "--log-interval", "5")
QUICK_LENGTH = ("--train-iters", "20", "--eval-interval", "10", "--log-interval", "5")
QUESTION = "def is_weekend(day): return day.weekday() >= 5"

console = Console()


def prepare_data(output: Path, quick: bool, seed: int) -> None:
    """Build data and model, unless an earlier demo on this Python did; keep other folders."""
    marker = output / MARKER
    wanted = {
        "python": sys.version.split()[0],
        "quick": quick,
        "seed": seed,
        "topics": list(TOPICS),
    }
    if marker.exists():
        if json.loads(marker.read_text(encoding="utf-8")) == wanted:
            console.print(f"data and model are already in {output}", highlight=False)
            return
    elif output.exists() and any(output.iterdir()):
        sys.exit(f"{output} is not empty and not the demo's: choose another folder with --output.")
    # Without the marker, an incomplete folder would look like somebody else's.
    output.mkdir(parents=True, exist_ok=True)
    marker.write_text("{}\n", encoding="utf-8")
    start = time.perf_counter()
    made = build_demo(output, limit=40 if quick else None, seed=seed)
    marker.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    show_summary(made, time.perf_counter() - start, output)


def run_command(*words: str) -> float:
    """Print a rapidformer command, run it and return its duration in seconds; exit if it fails."""
    console.print()
    show_command(*words)
    console.print()
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which("rapidformer", path=path)
    if program is None:
        sys.exit("the command rapidformer is not installed: run `make install` first.")
    start = time.perf_counter()
    status = subprocess.run([program, *words], check=False).returncode
    if status != 0:
        sys.exit(f"the command above failed with status {status}.")
    return time.perf_counter() - start


def show_command(*words: str) -> None:
    text = escape(shlex.join(("rapidformer", *words)))
    console.print(f"[bold green]$[/] [bold]{text}[/]", soft_wrap=True, highlight=False)


def choose_examples(test: Path, to: Path) -> list[dict[str, Any]]:
    """One short test row of every topic, written without its label."""
    rows = [json.loads(line) for line in test.read_text(encoding="utf-8").splitlines()]
    random.Random(SEED).shuffle(rows)
    chosen = []
    for topic in TOPICS:
        of_topic = (row for row in rows if row["label"] == topic)
        chosen += sorted(of_topic, key=lambda row: not 5 <= row["text"].count("\n") <= 8)[:1]
    write_lines(({"text": row["text"]} for row in chosen), to)
    return chosen


def show_predictions(chosen: list[dict[str, Any]], predictions: Path) -> None:
    table = Table(title="Functions that the model has never seen")
    table.add_column("function", no_wrap=True, max_width=40)
    for name in ("topic", "model says", "sure"):
        table.add_column(name, no_wrap=True)
    answers = predictions.read_text(encoding="utf-8").splitlines()
    for row, line in zip(chosen, answers, strict=True):
        answer = json.loads(line)
        colour, mark = ("green", "✓") if answer["label"] == row["label"] else ("red", "✗")
        table.add_row(
            escape(row["function"].partition(":")[2]),
            row["label"],
            f"[{colour}]{answer['label']} {mark}[/]",
            f"{answer['score']:.0%}",
        )
    console.print(table)
    row = chosen[len(chosen) // 2]
    name = escape(row["function"].partition(":")[2])
    console.print(f"[bold]{name}[/] as the model reads it, with the names of modules hidden:")
    console.print(Syntax(row["text"], "python", background_color="default"))
    console.print()


def draw_confusion(confusion: dict[str, Any], picture: Path) -> None:
    """Rows are the true topics; a shade is the share of its row."""
    from matplotlib.figure import Figure

    names, matrix = confusion["labels"], confusion["counts"]
    figure = Figure(figsize=(6.5, 5.5), layout="constrained")
    axes = figure.subplots()
    shares = [[count / max(1, sum(row)) for count in row] for row in matrix]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for y, row in enumerate(matrix):
        for x, count in enumerate(row):
            colour = "white" if shares[y][x] > 0.5 else "#333333"
            axes.text(x, y, str(count) if count else "·", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("the model says")
    axes.set_ylabel("the function is about")
    axes.set_title(f"{sum(map(sum, matrix)):,} functions that the model has never seen")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(picture, dpi=150, facecolor="white")


def show_results(metrics: dict[str, Any], seconds: dict[str, float], output: Path) -> None:
    topics = [sum(row) for row in metrics["confusion_matrix"]["counts"]]
    chance = max(topics) / sum(topics)
    table = Table(title="Results of the demo", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    guess = f"always saying the most frequent topic: {chance:.1%}"
    table.add_row("test accuracy", f"[bold green]{metrics['accuracy']:.1%}[/] ({guess})")
    table.add_row("seconds", ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items()))
    for name, path in {
        "the run's page": "run/report.html",
        "loss curve": "curve.png",
        "mistakes": "confusion.png",
        "best model": "run/best",
        "every step": "run/metrics.jsonl",
        "data": "data",
    }.items():
        table.add_row(name, escape(str(output / path)))
    console.print(table)


def show_next(output: Path) -> None:
    console.print("\n[bold]Where to go from here[/] (first: . .venv/bin/activate)\n")
    console.print("Ask the model about a function of yours:", highlight=False)
    show_command(
        "predict", "--load", str(output / "run"), "--input", json.dumps({"text": QUESTION})
    )
    console.print(
        "\nTrain it in two processes with sharded weights, beside one process, and compare:"
    )
    show_command(
        "verify", "--config", str(output / "run" / "arguments.yaml"), "--nproc-per-node", "2",
        "--zero-3-memory-optimization",
    )  # fmt: skip
    console.print("\nFine-tune a published model on a public data set, or on your own folder:")
    show_command(
        "--task", "sequence_classification", "--pretrained-model-name-or-path", "bert-base-cased",
        "--data-path", "glue", "--data-name", "mrpc", "--mixed-precision",
    )  # fmt: skip
    console.print("\nMore: docs/quickstart.md")
    page = escape(str((output / "run" / "report.html").resolve()))
    console.print(f"Open the run's page in a browser: [bold]{page}[/]", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A demo: train, evaluate and predict.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true", help="a few steps on a little data")
    arguments = parser.parse_args()
    output: Path = arguments.output
    data, run = output / "data", output / "run"
    seconds: dict[str, float] = {}

    start = time.perf_counter()
    prepare_data(output, arguments.quick, arguments.seed)
    chosen = choose_examples(data / "test.jsonl", output / "examples.jsonl")
    seconds["data"] = time.perf_counter() - start
    seconds["training"] = run_command(
        "--task", "sequence_classification", "--from-scratch",
        "--pretrained-model-name-or-path", str(output / "model"),
        "--data-path", str(data), "--save", str(run), "--overwrite",
        "--seed", str(arguments.seed), *SHAPE, *TRAINING,
        *(QUICK_LENGTH if arguments.quick else LENGTH),
    )  # fmt: skip
    evaluation, predictions = output / "evaluation.json", output / "predictions.jsonl"
    seconds["evaluation"] = run_command(
        "evaluate", "--load", str(run), "--eval-split", "test", "--output", str(evaluation)
    )
    seconds["prediction"] = run_command(
        "predict", "--load", str(run), "--data-path", str(output / "examples.jsonl"),
        "--output", str(predictions),
    )  # fmt: skip
    seconds["pictures"] = run_command("plot", str(run), "--output", str(output / "curve.png"))
    metrics = json.loads(evaluation.read_text(encoding="utf-8"))
    draw_confusion(metrics["confusion_matrix"], output / "confusion.png")

    console.print()
    show_predictions(chosen, predictions)
    show_results(metrics, seconds, output)
    show_next(output)


if __name__ == "__main__":
    main()
