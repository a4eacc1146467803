"""One run of a benchmark: what to measure, and what was measured. Does not import torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
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
        eval_iters=0, tensorboard_dir=None, report_to=None, exit_interval=None,
        exit_duration_in_mins=None, progress=False, log_level="warning",
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


_PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "pipeline": "forward and backward",
    "update": "optimizer step",
    "loop": "training loop",
}
_GIB = 2**30
_FAR_APART = 1.1
_LONG_DELAY = 1.0
"""Seconds of a first step that count."""
_NO_TOKENS = "the batches have no token ids"


def describe_result(result: Result) -> list[str]:
    """A table with one figure per line."""
    times = result.step_times
    rate = f"{result.tokens / result.seconds:,.0f}" if result.slots else "-"
    padding = f"{1 - result.tokens / result.slots:.0%}" if result.slots else "-"
    spread = f"median; fastest {_format_time(min(times))}, slowest {_format_time(max(times))}"
    memory = "of the process" if result.device.startswith("CPU") else "of the GPU"
    rows = [
        ("tokens/s", rate, "without padding" if result.slots else _NO_TOKENS),
        ("samples/s", f"{result.rows / result.seconds:,.1f}", ""),
        ("step", _format_time(statistics.median(times)), spread if len(times) > 2 else ""),
        ("first step", _format_time(result.first_step), "including compilation"),
        ("MFU", *_describe_utilization(result)),
        ("peak memory", f"{result.peak_memory / _GIB:.2f} GiB", memory),
        ("padding", padding, "of the positions in the batches"),
    ]
    if result.graphs:
        rows.append(("graphs", f"{result.graphs}", _describe_late_graphs(result)))
    width = max(len(value) for _, value, _ in rows)
    lines = [f"{name:<12} {value:>{width}}   {note}".rstrip() for name, value, note in rows]
    return [*lines, *_describe_phases(result)]


def describe_ratio(ours: Sequence[Result], theirs: Sequence[Result]) -> str:
    """How much faster we are than another trainer, per token; run in turn with it."""
    rate = get_rate(*theirs)
    ratio = get_rate(*ours) / rate
    ratios = [get_rate(mine) / get_rate(other) for mine, other in zip(ours, theirs, strict=True)]
    in_turn = " and ".join(f"{one:.2f}" for one in ratios)
    memory = ours[0].peak_memory / theirs[0].peak_memory if theirs[0].peak_memory else 0.0
    unit = "tokens" if theirs[0].slots else "samples"
    line = (
        f"{rate:,.0f} {unit}/s: rapidformer is {ratio:.2f} x as fast ({in_turn} in turn), with "
        f"{memory:.0%} of its memory"
    )
    if max(ratios) < _FAR_APART * min(ratios):
        return line
    return f"{line}. These ratios are far apart: use an idle machine, or larger --bench-steps"


def describe_gain(base: Result, changed: Result) -> str:
    """What one more switch gives."""
    gain = get_rate(changed) / get_rate(base)
    memory = (changed.peak_memory - base.peak_memory) / _GIB
    line = f"{gain:.2f} x as fast, {memory:+.2f} GiB, first step {changed.first_step:.1f} s"
    line += _describe_delay(base, changed)
    if not changed.late_graphs:
        return line
    return f"{line}; {changed.graphs} graphs, {_describe_late_graphs(changed)}"


def _describe_delay(base: Result, changed: Result) -> str:
    """When a longer first step has paid for itself; both runs have timed the same batches."""
    delay = changed.first_step - base.first_step
    saved = base.seconds / len(base.step_times) - changed.seconds / len(changed.step_times)
    if delay < _LONG_DELAY:
        return ""
    return f" (pays from step {math.ceil(delay / saved):,} on)" if saved > 0 else " (never pays)"


def _describe_late_graphs(result: Result) -> str:
    late = result.late_graphs
    return f"{late} of them in the timed steps: try a larger --bench-warmup" if late else ""


def get_rate(*runs: Result) -> float:
    """Tokens per second, without padding. In models without tokens, a sample counts as one."""
    counted = sum(run.tokens if run.slots else run.rows for run in runs)
    return counted / sum(run.seconds for run in runs)


def _describe_utilization(result: Result) -> tuple[str, str]:
    if result.matrix_rate is None:
        return "-", "not for a CPU, whose rate depends on what else it does"
    if not result.slots:
        return "-", _NO_TOKENS
    rate = result.operations / result.seconds
    devices = f"{result.ranks} x " if result.ranks > 1 else ""
    peak = result.matrix_rate
    text = f"{peak / 1e12:.0f} TFLOP/s" if peak >= 1e13 else f"{peak / 1e9:.0f} GFLOP/s"
    formula = f"({result.formula}) / {devices}{text} in {result.precision}"
    return f"{rate / (peak * result.ranks):.1%}", formula


def _describe_phases(result: Result) -> list[str]:
    """How a step's time is divided, and how busy the GPU is."""
    total = sum(result.phases.values())
    parts = [
        f"{text} {result.phases[name] / total:.0%}"
        for name, text in _PHASES.items()
        if name in result.phases
    ]
    lines = ["", f"Time per step: {', '.join(parts)}."] if parts else []
    if result.busy is not None:
        lines.append(
            f"The GPU is busy {result.busy:.0%} of the time, and waits for the host otherwise."
        )
    return lines


def _format_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1000:.1f} ms"
