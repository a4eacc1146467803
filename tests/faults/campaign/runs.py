"""Start the victim in a layout, read its trace, and look over the folder that it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.checkpoint.loading import check_checkpoint
from rapidformer.errors import CheckpointError
from tests.processes import PATIENCE, is_alive, wait_until

VICTIM = Path(__file__).with_name("victim.py")
ROOT = Path(__file__).parents[3]
_FLAGS = (
    "--device", "cpu", "--lr", "0.01", "--global-batch-size", "4", "--epochs", "2",
    "--save-interval", "3", "--eval-interval", "4", "--save-total-limit", "3",
    "--log-interval", "1", "--log-level", "warning", "--resume", "auto", "--no-progress",
    "--async-save", "on",
)  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1 process": ("--nproc-per-node", "1", "--micro-batch-size", "2"),
    "2 processes": ("--nproc-per-node", "2", "--micro-batch-size", "2"),
    "ZeRO-3": (
        "--nproc-per-node", "2", "--micro-batch-size", "2", "--zero-3-memory-optimization",
    ),
    "TP 2": (
        "--nproc-per-node", "2", "--micro-batch-size", "4", "--tensor-model-parallel-size", "2",
    ),
}  # fmt: skip
_KEPT = {".run.json", ".launch"}


@dataclass(frozen=True)
class Outcome:
    """How one start of the victim ended."""

    status: int
    output: str


@dataclass
class Run:
    """A folder with a run of the victim, and everything that its attempts wrote."""

    python: Path
    folder: Path
    layout: str
    attempts: list[Outcome] = field(default_factory=list)

    @property
    def save(self) -> Path:
        return self.folder / "run"

    def start(
        self, fault: dict[str, Any] | None = None, *, save: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """The victim, started; ``fault`` says where it breaks something by itself."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        variables = {
            **os.environ,
            **variables,
            "TRACE": str(self.folder / "trace"),
            "FAULT": json.dumps(fault or {}),
            "ATTEMPT": str(len(self.attempts)),
            "CAMPAIGN": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        }
        words = [*_FLAGS, "--save", str(save or self.save), *LAYOUTS[self.layout]]
        return subprocess.Popen(
            [self.python, "-m", "rapidformer.cli.main", "--user-script", str(VICTIM), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
            cwd=self.folder,
        )

    def finish(self, process: subprocess.Popen[str]) -> Outcome:
        """Wait for an attempt and everything it started."""
        output, _ = process.communicate(timeout=PATIENCE)
        outcome = Outcome(process.returncode, output)
        self.attempts.append(outcome)
        return outcome

    def kill(self) -> None:
        """Everything that the run has started, as when a machine loses its power."""
        for pid in find_processes(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for_ranks(self) -> None:
        """Until every rank is gone: the kernel takes its time, and a live one has the folder."""
        texts = [path.read_text() for path in (self.folder / "trace").glob("pid_*")]
        wait_until(lambda: not any(is_alive(int(text)) for text in texts if text))

    # ---- what is there afterwards ----------------------------------------------------------------

    def read_trace(self) -> list[dict[str, Any]]:
        """All lines of all ranks, each with its rank."""
        found = []
        for path in sorted((self.folder / "trace").glob("rank_*.jsonl")):
            rank = int(path.stem.removeprefix("rank_"))
            found += [{**json.loads(line), "rank": rank} for line in path.read_text().splitlines()]
        return found

    def read_counts(self, rank: int) -> dict[str, int]:
        """How often each moment came, in a run that was not killed."""
        counts: dict[str, int] = json.loads(
            (self.folder / "trace" / f"counts_{rank}.json").read_text()
        )
        return counts

    def read_metric_steps(self) -> list[int]:
        path = self.save / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line["step"] for line in map(json.loads, lines) if "loss" in line]

    def hash_model(self) -> str:
        return hashlib.sha256((self.save / "last" / "model.safetensors").read_bytes()).hexdigest()

    def find_unreadable(self) -> list[str]:
        """Published checkpoints that do not pass their own check."""
        found = []
        for folder in find_checkpoints(self.save):
            try:
                check_checkpoint(folder)
            except CheckpointError as reason:
                found.append(str(reason))
        return found

    def find_leftovers(self) -> list[str]:
        """Files that belong to no finished run, and processes that outlived theirs."""
        names = [path.name for path in self.save.iterdir() if path.name.startswith(".")]
        found = [name for name in names if name not in _KEPT]
        return found + [f"process {pid}" for pid in find_processes(self.folder)]


def find_processes(folder: Path) -> list[int]:
    """Live processes that a run in this folder started."""
    found = []
    mark = f"CAMPAIGN={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = mark in path.read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found
