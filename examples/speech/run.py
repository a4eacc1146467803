"""Speech recognition from a folder of recordings to transcripts, on a CPU and without a download.

Somebody sings do, re, mi, fa and so, and a model learns to write it down. The recordings are wav
files of 8 kHz next to a metadata.csv, as published data sets have them. A small wav2vec 2.0 starts
from random weights and spells the notes with the letters of the transcripts (CTC).
Each command is printed before it runs, so that it can be copied and changed.

    python examples/speech/run.py [--output speech-output] [--steps 80]
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile

RATE = 8000
NOTES = {"do": 300, "re": 500, "mi": 800, "fa": 1300, "so": 2100}  # the pitch, in hertz
MODEL = {
    "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "hidden_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
    "conv_dim": [32, 48], "conv_kernel": [40, 16], "conv_stride": [20, 16],
    "num_feat_extract_layers": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0,
}  # fmt: skip
TRAINING = (
    "--global-batch-size", "16", "--micro-batch-size", "16", "--lr", "8e-3",
    "--lr-warmup-fraction", "0.1", "--nproc-per-node", "1", "--log-interval", "20",
)  # fmt: skip


def sing(note: str, dice: np.random.Generator) -> np.ndarray:
    """A tone with the voice of nobody in particular: higher or lower, louder or softer."""
    size = round(RATE * dice.uniform(0.08, 0.12))
    time = np.arange(size) / RATE
    tone = np.sin(2 * np.pi * NOTES[note] * dice.uniform(0.95, 1.05) * time)
    return dice.uniform(0.3, 0.6) * tone * np.hanning(size) ** 0.25


def record(folder: Path, count: int, seed: int) -> None:
    """Write recordings of one to four notes, and what is sung in them."""
    dice = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        words = list(dice.choice(list(NOTES), size=dice.integers(1, 5)))
        parts = [np.pad(sing(word, dice), (0, RATE // 40)) for word in words]
        samples = np.concatenate(parts)
        samples = samples + dice.normal(0, 0.02, len(samples))
        soundfile.write(folder / f"{number:04}.wav", samples, RATE)
        rows.append({"file_name": f"{number:04}.wav", "transcription": " ".join(words)})
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["file_name", "transcription"])
        writer.writeheader()
        writer.writerows(rows)


def run(*words: str) -> None:
    """Print a command and run it."""
    print(f"\n$ rapidformer {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "rapidformer", *words], check=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("speech-output"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--recordings", type=int, default=320)
    arguments = parser.parse_args(words)
    output, count = arguments.output, arguments.recordings
    record(output / "data" / "train", count, 0)
    record(output / "data" / "validation", max(8, count // 10), 1)
    (output / "model").mkdir(exist_ok=True)
    (output / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    task = ("--task", "speech_recognition", "--data-path", str(output / "data"))
    model = ("--pretrained-model-name-or-path", str(output / "model"), "--from-scratch")
    run("data", "show", *task, *model, "-n", "2")
    run(
        *task, *model, *TRAINING, "--train-iters", str(arguments.steps),
        "--eval-interval", str(max(1, arguments.steps // 4)), "--save", str(output / "run"),
        "--overwrite",
    )  # fmt: skip
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    print("\nof the notes in recordings that were never trained on, wrong are")
    for row in map(json.loads, lines):
        if "eval_wer" in row:
            print(f"after {row['step']:4} steps {row['eval_wer']:6.1%}")
    recording = output / "data" / "validation" / "0000.wav"
    run("predict", "--load", str(output / "run"), "--input", str(recording))


if __name__ == "__main__":
    main()
