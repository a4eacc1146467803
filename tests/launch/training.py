"""A script of the tests: two ranks fit a line, and a rank may wait to be killed.

Run by the command, not imported: ``rapidformer launch training.py --save FOLDER ...``. Each rank
writes its process id to FOLDER/pids, so that a test knows which process to kill. With STEPS=n in
its environment, a rank hangs after n steps.
"""

from __future__ import annotations

import itertools
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
    _steps = itertools.count()

    def train_valid_test_datasets_provider(self) -> Any:
        torch.manual_seed(0)
        return [{"x": x.reshape(1), "labels": 2 * x} for x in torch.rand(400)], None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        return Line(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        if next(self._steps) == int(os.environ.get("STEPS", "-1")):
            time.sleep(600)
        return model(**batch)


if __name__ == "__main__":
    engine = RapidformerEngine()
    folder = Path(engine.args.save or ".") / "pids"
    folder.mkdir(parents=True, exist_ok=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    (folder / f"{attempt}_{engine.args.rank}").write_text(f"{os.getpid()}.")
    LineTrainer(engine).train()
