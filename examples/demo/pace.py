"""Time a few steps on this machine and fit the demo's training into two minutes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

# What is left of the two minutes for training, after data, start-up, the test set and the plot.
TRAINING_SECONDS = 75
WARM_UP, MEASURED = 2, 6
EVALUATIONS = 4
# A batch that is only evaluated takes about a third of a training step.
EVALUATION_COST = 1 / 3


def measure_step(model_folder: Path, batch_size: int, length: int) -> float:
    """Seconds per training step of the demo's model on this machine, under its current load."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    ids = torch.randint(5, config.vocab_size, (batch_size, length), device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    start = 0.0
    for number in range(WARM_UP + MEASURED):
        if number == WARM_UP:
            start = time.perf_counter()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / MEASURED


def choose_steps(seconds_per_step: float, wanted: int, eval_batches: int) -> int:
    """Steps that fit into the training time, including evaluations; at most ``wanted``."""
    room = TRAINING_SECONDS / seconds_per_step - EVALUATIONS * eval_batches * EVALUATION_COST
    return max(min(wanted, math.floor(room)), 40)


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if json.loads(line))
