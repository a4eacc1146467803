"""One run of a benchmark: what to measure, and what was measured. Does not import torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rapidformer.config import Settings

SOURCE = "rapidformer bench"
PROFILED_STEPS = 3
"""Steps after the timed ones that run with a profiler, on a GPU."""
_MOST_STEPS = 500
"""Limit if the number of timed steps depends on how long they take."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as described to each of its ranks."""

    folder: str
    name: str
    steps: int
    """How many steps to time; with ``seconds``, at least this many."""
    warm_up: int
    seconds: float = 0.0
    """Go on timing until all timed steps took about this long; 0 to stop after ``steps``."""
    peer: str | None = None
    """Another trainer that gets the same model and data: ``hf`` or ``hf-compile``."""

    @property
    def most_steps(self) -> int:
        return max(self.steps, _MOST_STEPS) if self.seconds else self.steps

    def count_steps(self, seconds: float) -> int:
        """How many steps to time in all, if the first ``steps`` of them took this long."""
        needed = math.ceil(self.steps * self.seconds / max(seconds, 1e-6))
        return min(max(self.steps, needed), self.most_steps)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Job:
        return cls(**json.loads(text))

    def get_path(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.name}_{rank}.json"


@dataclass(kw_only=True)
class Result:
    """What one rank measured. Counts cover the timed steps only."""

    model: str
    parameters: int
    device: str
    precision: str
    global_batch: int
    first_step: float
    """Seconds, including compilation."""
    step_times: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in all timed steps, by part of a step."""
    rows: int = 0
    tokens: int = 0
    """Without padding."""
    slots: int = 0
    """Tokens and padding."""
    peak_memory: int = 0
    """Bytes, of the GPU or, on a CPU, of the process."""
    operations: float = 0.0
    """Floating-point operations of the model, for the MFU."""
    formula: str = ""
    """How ``operations`` were counted."""
    matrix_rate: float | None = None
    """Operations per second of a large matrix product; None if ranks share the CPU's cores."""
    busy: float | None = None
    """Fraction of the time that the GPU is busy; None on a CPU."""
    graphs: int = 0
    """Graphs that torch.compile compiled, in all steps."""
    late_graphs: int = 0
    """Those compiled during timed steps, which they slowed down."""
    is_counted: bool = True
    """False for a rank that sees the same rows as another."""
    ranks: int = 1
    """Ranks whose results were merged."""

    @property
    def seconds(self) -> float:
        return sum(self.step_times)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Result:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def change_settings(args: Settings, job: Job) -> Settings:
    """The user's settings, changed for a short run that saves nothing and evaluates nothing."""
    steps = job.warm_up + job.most_steps + PROFILED_STEPS + 1
    return args.keep_nothing(SOURCE).replace(
        SOURCE,
        train_iters=steps, epochs=None, train_samples=None, train_tokens=None,
        lr_warmup_iters=min(args.lr_warmup_iters, steps - 1), lr_warmup_samples=0,
        lr_decay_samples=None, rampup_batch_size=None,
        eval_iters=0, tensorboard_dir=None, exit_interval=None, exit_duration_in_mins=None,
        progress=False, log_level="warning",
        data_cache_path=args.data_cache_path or f"{job.folder}/index-cache",
    )  # fmt: skip


def merge(results: list[Result]) -> Result:
    """The result of a run from those of its ranks."""
    first = results[0]
    counted = [result for result in results if result.is_counted]
    for name in ("rows", "tokens", "slots", "operations"):
        setattr(first, name, sum(getattr(result, name) for result in counted))
    first.peak_memory = max(result.peak_memory for result in results)
    first.ranks = len(results)
    return first
