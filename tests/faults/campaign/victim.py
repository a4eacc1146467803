"""A small run to be killed, corrupted and resumed: the script that the campaigns start.

Every forward pass leaves a line in ``$TRACE/rank_N.jsonl``: attempt, step, samples, exact loss.
``$FAULT`` says where to die: ``{"at": "forward", "count": 5, "rank": 0, "all": false}`` kills at
the fifth forward pass of training, ``evaluate`` at one of an evaluation, and ``open``, ``mkdir``,
``rename`` and ``remove`` at that event in the run's folder. ``background write`` is any of these
while training continues: between the copy of the state and the published checkpoint. ``rank`` is
who counts; with ``all`` it takes the other ranks with it. Instead of dying, ``"act"`` may fill the
disk (``fill``), use up its inodes (``inodes``), make it read-only (``lock``) or delete the run's
folder (``vanish``).

With ``$WAIT_FOR`` (``SIGTERM``, say), the fifth forward pass waits until that signal was caught.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer import Finetuner, RapidformerEngine

SAMPLES = 32
BALLAST = ".ballast"
EVENTS = {
    "open": "open", "os.mkdir": "mkdir", "os.rename": "rename", "os.link": "rename",
    "os.remove": "remove", "os.rmdir": "remove", "shutil.rmtree": "remove",
}  # fmt: skip


class Death:
    """Counts moments, and ends the process at the one that ``$FAULT`` names."""

    def __init__(self, rank: int, trace: Path, folder: str) -> None:
        fault = json.loads(os.environ.get("FAULT", "{}"))
        self._fault = fault if fault.get("rank") == rank else {}
        self._trace = trace
        self._folder = folder
        self._seen: Counter[str] = Counter()
        self._is_due = False
        (trace / f"pid_{rank}").write_text(str(os.getpid()))
        sys.addaudithook(self._hear)

    def meet(self, moment: str) -> None:
        self._seen[moment] += 1
        fault = self._fault
        if fault.get("at") == moment and fault.get("count") == self._seen[moment]:
            self._is_due = True
        if not self._is_due:
            return
        if "act" in fault:
            self._is_due = False  # what it does there is heard as well
            self._is_due = not break_disk(Path(self._folder), fault["act"])
            return
        me = os.getpid()
        pids = [int(path.read_text()) for path in self._trace.glob("pid_*")] if fault["all"] else []
        for pid in [*(pid for pid in pids if pid != me), me]:
            os.kill(pid, signal.SIGKILL)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        name = EVENTS.get(event)
        path = arguments[0] if name else None
        if name and isinstance(path, str | Path) and str(path).startswith(self._folder):
            self.meet(name)
            if threading.current_thread().name == "rapidformer-save":
                self.meet("background write")

    def write_counts(self, path: Path) -> None:
        path.write_text(json.dumps(self._seen))


def break_disk(folder: Path, act: str) -> bool:
    """Take the run's disk from it; ``folder`` is where it is mounted. False if it is too busy."""
    if act == "vanish":
        shutil.rmtree(folder, ignore_errors=True)
    elif act == "lock":
        words = ["mount", "-o", "remount,ro", str(folder)]
        return subprocess.run(words, check=False, capture_output=True).returncode == 0
    else:
        ballast = folder / BALLAST
        ballast.mkdir()
        with suppress(OSError):
            for number in itertools.count():
                (ballast / str(number)).write_bytes(bytes(2**16 if act == "fill" else 0))
    return True


class Victim(Finetuner):
    passes = 0

    def __init__(self, engine: RapidformerEngine) -> None:
        super().__init__(engine)
        rank, trace = engine.args.rank, Path(os.environ["TRACE"])
        trace.mkdir(parents=True, exist_ok=True)
        self.death = Death(rank, trace, str(engine.args.save))
        self.counts = trace / f"counts_{rank}.json"
        # One write per line, straight to the kernel: a killed process loses none of them.
        path = trace / f"rank_{rank}.jsonl"
        self._trace = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def train_valid_test_datasets_provider(self) -> Any:
        rows = [
            [number, *((number * k + 3) % SAMPLES for k in (3, 5, 7))] for number in range(SAMPLES)
        ]
        data = [{"input_ids": row, "labels": row} for row in rows]
        return data, data[:4], None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        dropout = float(os.environ.get("DROPOUT", "0.1"))
        config = GPT2Config(
            vocab_size=SAMPLES, n_positions=4, n_embd=8, n_layer=2, n_head=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return GPT2LMHeadModel(config), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.death.meet("forward")
        self.passes += 1
        if "WAIT_FOR" in os.environ and self.passes == 5:
            self._wait_for(getattr(signal, os.environ["WAIT_FOR"]))
        loss = model(**batch).loss
        line = {
            "attempt": os.environ.get("ATTEMPT", "0"),
            "step": self.engine.updates.clock.updates,
            "samples": batch["input_ids"][:, 0].tolist(),
            "loss": float(loss.detach()).hex(),
        }
        os.write(self._trace, (json.dumps(line) + "\n").encode())
        return loss

    def _wait_for(self, number: signal.Signals) -> None:
        handler = signal.getsignal(number)
        self.counts.with_name(f"waiting_{self.args.rank}").touch()
        # The first signal puts the handler back that was there before the loop.
        while signal.getsignal(number) is handler or signal.getsignal(number) == handler:
            time.sleep(0.01)

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        losses = []
        for batch in eval_dataloader:
            self.death.meet("evaluate")
            losses.append(model[0](**batch).loss)
        return {"error": float(torch.stack(losses).mean())}


if __name__ == "__main__":
    victim = Victim(RapidformerEngine())
    victim.train()
    victim.death.write_counts(victim.counts)
