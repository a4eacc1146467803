"""The benchmark's results as text. Does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rapidformer.benchmarking.job import Result

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
    if not changed.late_graphs:
        return line
    return f"{line}; {changed.graphs} graphs, {_describe_late_graphs(changed)}"


def _describe_late_graphs(result: Result) -> str:
    late = result.late_graphs
    return f"{late} of them in the timed steps: try a larger --bench-warmup" if late else ""


def get_rate(*runs: Result) -> float:
    """Tokens per second, without padding. In models without tokens, a sample counts as one."""
    counted = sum(run.tokens if run.slots else run.rows for run in runs)
    return counted / sum(run.seconds for run in runs)


def _describe_utilization(result: Result) -> tuple[str, str]:
    if result.matrix_rate is None:
        return "-", "the ranks share this CPU's cores"
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
