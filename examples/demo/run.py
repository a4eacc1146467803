"""The demo behind ``make demo``: fine-tune, evaluate and predict with the black-box command.

Everything comes from this machine: the data is built from Python's own functions and docstrings
(build_data.py), and the model starts from random weights. Each command is printed before it runs,
so that it can be copied and changed.

    python examples/demo/run.py [--output demo-output] [--quick] [--full]
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

from build_data import SEED, build_demo, show_summary, write_lines
from pace import EVALUATIONS, choose_steps, count_lines, measure_step
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Marks a folder as the demo's own; the demo replaces runs in no other folder.
MARKER = "made-by-rapidformer-demo.json"
NUM_EXAMPLES = 8
TASK = ("--task", "sequence_classification")
SHAPE = {"--seq-length": "28", "--nproc-per-node": "1"}
BATCHES = {"--micro-batch-size": "64", "--global-batch-size": "64"}
RATE = {"--lr": "1e-3", "--lr-decay-style": "linear", "--lr-warmup-fraction": "0.05"}
EPOCHS = 2
QUICK_LENGTH = {"--train-iters": "20", "--eval-interval": "10", "--log-interval": "5"}

console = Console()


def prepare_data(output: Path, quick: bool) -> None:
    """Build data and model, unless an earlier demo on this Python did; keep other folders."""
    marker = output / MARKER
    wanted = {"python": sys.version.split()[0], "quick": quick, "seed": SEED}
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
    made = build_demo(output, limit=80 if quick else None)
    marker.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    show_summary(made, time.perf_counter() - start, output)


def choose_length(output: Path) -> dict[str, str]:
    """As many steps as fit into two minutes on this machine; prints the choice."""
    batch, length = int(BATCHES["--micro-batch-size"]), int(SHAPE["--seq-length"])
    rows = count_lines(output / "data" / "train.jsonl")
    wanted = EPOCHS * (rows // batch)
    seconds = measure_step(output / "model", batch, length)
    eval_batches = -(-count_lines(output / "data" / "validation.jsonl") // batch)
    steps = choose_steps(seconds, wanted, eval_batches)
    shown = f"A training step takes {1000 * seconds:.0f} ms on this machine"
    if steps == wanted:
        text = f"{shown}: {EPOCHS} epochs ({wanted:,} steps) fit into the demo's two minutes."
    else:
        text = (
            f"{shown}: {steps:,} of {wanted:,} steps fit into the demo's two minutes, so training "
            f"stops early and scores lower. --full trains all {EPOCHS} epochs."
        )
    console.print(text, highlight=False)
    interval = max(steps // EVALUATIONS, 1)
    return get_length(steps, interval)


def choose_training(output: Path, *, quick: bool, full: bool) -> dict[str, str]:
    if quick:
        return QUICK_LENGTH
    if full:
        return {"--epochs": str(EPOCHS), "--eval-interval": "250", "--log-interval": "20"}
    return choose_length(output)


def get_length(steps: int, interval: int) -> dict[str, str]:
    return {
        "--train-iters": str(steps),
        "--eval-interval": str(interval),
        "--log-interval": "20",
    }


def run_command(*words: str) -> float:
    """Print a rapidformer command, run it and return its duration in seconds; exit if it fails."""
    console.print(f"\n[bold green]$[/] [bold]{escape(shlex.join(('rapidformer', *words)))}[/]\n",
                  soft_wrap=True, highlight=False)  # fmt: skip
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which("rapidformer", path=path)
    if program is None:
        sys.exit("the command rapidformer is not installed: run `make install` first.")
    start = time.perf_counter()
    status = subprocess.run([program, *words], check=False).returncode
    if status != 0:
        sys.exit(f"the command above failed with status {status}.")
    return time.perf_counter() - start


def _flatten(flags: dict[str, str]) -> list[str]:
    return [word for flag in flags.items() for word in flag]


def choose_examples(test: Path, to: Path) -> list[dict[str, Any]]:
    """A few test rows, half with the right docstring, written without their labels."""
    rows = [json.loads(line) for line in test.read_text(encoding="utf-8").splitlines()]
    rng = random.Random(SEED)
    chosen: list[dict[str, Any]] = []
    for label in (0, 1):
        fitting = [row for row in rows if row["label"] == label]
        chosen += rng.sample(fitting, min(NUM_EXAMPLES // 2, len(fitting)))
    rng.shuffle(chosen)
    write_lines(
        ({"sentence1": row["sentence1"], "sentence2": row["sentence2"]} for row in chosen), to
    )
    return chosen


def show_predictions(chosen: list[dict[str, Any]], predictions: Path) -> None:
    table = Table(title="Does this docstring belong to this function?")
    table.add_column("function", no_wrap=True, max_width=22)
    table.add_column("docstring", no_wrap=True, max_width=28)
    for name in ("truth", "model", "sure"):
        table.add_column(name, justify="right", no_wrap=True)
    answers = predictions.read_text(encoding="utf-8").splitlines()
    for row, line in zip(chosen, answers, strict=True):
        answer = json.loads(line)
        said = int(str(answer["label"]).removeprefix("LABEL_"))
        colour, mark = ("green", "✓") if said == row["label"] else ("red", "✗")
        table.add_row(
            escape(row["sentence1"].partition(":")[0]),
            escape(row["sentence2"]),
            _name_label(row["label"]),
            f"[{colour}]{_name_label(said)} {mark}[/]",
            f"{answer['score']:.0%}",
        )
    console.print(table)


def _name_label(label: int) -> str:
    return "yes" if label == 1 else "no"


def show_results(
    metrics: dict[str, Any], seconds: dict[str, float], paths: dict[str, Path]
) -> None:
    accuracy = next(metrics[name] for name in ("eval_accuracy", "accuracy") if name in metrics)
    table = Table(title="Results of the demo", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("test accuracy", f"[bold green]{accuracy:.1%}[/] (chance: 50.0%)")
    table.add_row("seconds", ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items()))
    for name, path in paths.items():
        table.add_row(name, escape(str(path)))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="A demo: fine-tune, evaluate and predict.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps on a little data")
    parser.add_argument(
        "--full", action="store_true", help="train two epochs, however long it takes"
    )
    given = parser.parse_args()
    output: Path = given.output
    data, run, best = output / "data", output / "run", output / "run" / "best"
    seconds: dict[str, float] = {}

    start = time.perf_counter()
    prepare_data(output, given.quick)
    chosen = choose_examples(data / "test.jsonl", output / "examples.jsonl")
    seconds["data"] = time.perf_counter() - start
    length = choose_training(output, quick=given.quick, full=given.full)
    seconds["training"] = run_command(
        *TASK, "--pretrained-model-name-or-path", str(output / "model"), "--from-scratch",
        "--data-path", str(data), "--save", str(run), "--overwrite",
        *_flatten(SHAPE | BATCHES | RATE | length),
    )  # fmt: skip
    common = ("--load", str(run), *_flatten(SHAPE))
    evaluation, predictions = output / "evaluation.json", output / "predictions.jsonl"
    seconds["evaluation"] = run_command(
        "evaluate", *common, "--data-path", str(data), "--eval-split", "test",
        "--micro-batch-size", "256", "--output", str(evaluation),
    )  # fmt: skip
    seconds["prediction"] = run_command(
        "predict", *common, "--data-path", str(output / "examples.jsonl"),
        "--output", str(predictions),
    )  # fmt: skip
    seconds["picture"] = run_command("plot", str(run), "--output", str(output / "curve.png"))

    console.print()
    show_predictions(chosen, predictions)
    show_results(
        json.loads(evaluation.read_text(encoding="utf-8")),
        seconds,
        {
            "loss curve": output / "curve.png",
            "best model": best,
            "predictions": predictions,
            "every step": run / "metrics.jsonl",
            "data": data,
        },
    )


if __name__ == "__main__":
    main()
