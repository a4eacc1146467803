"""How long the demo trains: it times a few steps here and fits the training into two minutes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

# Of the two minutes, what is left for training beside data, start-up, the test set and the picture.
TRAINING_SECONDS = 75
WARM_UP, MEASURED = 2, 6
EVALUATIONS = 4
# A batch that is only evaluated takes about a third of a training step.
EVALUATION_SHARE = 1 / 3


def measure_step(model_folder: Path, batch_size: int, length: int) -> float:
    """Seconds of one training step of the demo's model on this machine, as it is loaded now."""
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
    """Steps that fit into the training's time, evaluations included; at most those wanted."""
    room = TRAINING_SECONDS / seconds_per_step - EVALUATIONS * eval_batches * EVALUATION_SHARE
    return max(min(wanted, math.floor(room)), 40)


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if json.loads(line))
