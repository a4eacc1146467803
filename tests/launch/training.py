"""A script of the tests: a line is learnt by two processes, slowly enough to be disturbed.

Run by the command, not imported: ``rapidformer launch training.py --save FOLDER ...``. Each rank
leaves its process's number in FOLDER/pids, so that a test knows whom to kill.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapidformer import Finetuner, RapidformerEngine


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((self.layer(x).squeeze(-1) - labels) ** 2).mean()


class LineTrainer(Finetuner):
    def train_valid_test_datasets_provider(self) -> Any:
        torch.manual_seed(0)
        return [{"x": x.reshape(1), "labels": 2 * x} for x in torch.rand(400)], None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        return Line(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return model(**batch)


if __name__ == "__main__":
    engine = RapidformerEngine()
    folder = Path(engine.args.save or ".") / "pids"
    folder.mkdir(parents=True, exist_ok=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    (folder / f"{attempt}_{engine.args.rank}").write_text(f"{os.getpid()}.")
    LineTrainer(engine).train()
