"""The answer of ``rapidformer plan``: as JSON, which a run keeps, and as text. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rapidformer.planning.devices import GIB
from rapidformer.planning.search import MOST_ROWS, Layout, Planner
from rapidformer.planning.timing import describe_seconds, estimate_run

_SHOWN = 5
"""Layouts that are printed."""
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "loss": "loss",
    "gathers": "gathered weights",
    "buffers": "temporary buffers",
    "overhead": "context, libraries, communicators",
    "fragments": "fragments of the allocator",
}


def answer(planner: Planner, untimed: str | None = None) -> dict[str, Any]:
    """Everything that was found out, as JSON takes it; ``untimed``: why blocks were not timed."""
    asked = planner.plan()
    memory = asked.prediction.memory
    parts = memory.by_part() | {"host": memory.host}
    run = estimate_run(asked.timing, planner.settings, planner.cluster, planner.shape.samples)
    return {
        "model": planner.shape.model,
        "parameters": planner.shape.parameters,
        "devices": planner.cluster.describe(),
        "device_memory_gib": planner.cluster.device.memory,
        "precision": planner.shape.precision,
        "rows": round(planner.shape.count_rows(planner.settings.micro_batch_size)),
        "length": planner.shape.length,
        "positions": planner.shape.positions,
        "verdict": (verdict := asked.judge(planner.cluster)),
        "fits": verdict == "fits",
        **_describe_layout(asked),
        "memory": {name: size / GIB for name, size in parts.items() if size},
        "seconds_by_part": asked.timing.parts,
        "measured_by_predicted": planner.slowness,
        "untimed": untimed,
        "run": None if run is None else asdict(run),
        "largest_micro_batch": planner.find_largest_batch(),
        "longest_rows": planner.find_longest(),
        "switches": [_describe_layout(layout) for layout in planner.list_switches(_SHOWN)],
        "layouts": [_describe_layout(layout) for layout in planner.list_layouts(_SHOWN)],
    }


def _describe_layout(layout: Layout) -> dict[str, Any]:
    return {
        "flags": layout.list_flags(),
        "memory_gib": layout.gib,
        "allocated_gib": layout.prediction.memory.allocated / GIB,
        "step_time": layout.timing.step,
        "tokens_per_second": layout.timing.tokens_per_second,
        "samples_per_second": layout.timing.samples_per_second,
    }


def describe(found: dict[str, Any]) -> Iterator[str]:
    """The lines to print."""
    yield (
        f"model     {found['model']}: {found['parameters'] / 1e6:,.1f} M parameters, "
        f"{found['precision']}; micro-batches of {found['rows']} x {found['length']} tokens"
    )
    limit = found["device_memory_gib"]
    verdict = "tight on" if found["verdict"] == "tight" else found["verdict"]
    yield (
        f"memory    {found['memory_gib']:.1f} GiB on the rank that needs the most: {verdict} "
        f"{found['devices']} ({limit:.1f} GiB each)"
    )
    for name, title in _PARTS.items():
        if found["memory"].get(name, 0.0) >= 0.005:
            yield f"            {found['memory'][name]:8.2f} GiB  {title}"
    if host := found["memory"].get("host"):
        yield f"            {host:8.2f} GiB  in host memory, not on the device"
    yield (
        f"time      {describe_seconds(found['step_time'])} per step, "
        f"{_count(1 / found['step_time'])} steps/s, {_count(found['tokens_per_second'])} tokens/s, "
        f"{_count(found['samples_per_second'])} samples/s"
    )
    if ratio := found["measured_by_predicted"]:
        yield f"          measured on this GPU: blocks take {ratio:.2f} times what was predicted"
    elif found["untimed"]:
        yield f"          not measured, since blocks did not run here: {found['untimed']}"
    if run := found["run"]:
        yield (
            f"run       {run['updates']:,} steps: {describe_seconds(run['seconds'])}, "
            f"{run['device_hours']:,.3g} device hours"
        )
    yield from _describe_limits(found)
    yield from _describe_layouts(found)


def _describe_limits(found: dict[str, Any]) -> Iterator[str]:
    rows, length = found["largest_micro_batch"], found["longest_rows"]
    if rows:
        longest = f"rows of up to {length:,} tokens" if length else "no row fits"
        if length and length == found["positions"]:
            longest += ", all that the model has positions for"
        most = f"{rows}{' and more' * (rows == MOST_ROWS)}"
        yield f"limits    --micro-batch-size up to {most}; with {found['rows']}, {longest}"
    else:
        yield f"limits    not even one row of {found['length']:,} tokens fits"
    switches = found["switches"]
    if found["fits"]:
        return
    if switches:
        yield f"to fit    {_describe_one(switches[0])}"
        for other in switches[1:]:
            yield f"       or {_describe_one(other)}"
    else:
        yield "to fit    no single switch is enough"


def _describe_layouts(found: dict[str, Any]) -> Iterator[str]:
    if not found["layouts"]:
        yield "layouts   none fits these devices: take more of them, or larger ones"
        return
    yield "layouts   those that fit, the fastest first, all with the same result:"
    for layout in found["layouts"]:
        yield f"          {_describe_one(layout)}"


def _describe_one(layout: dict[str, Any]) -> str:
    return (
        f"{describe_seconds(layout['step_time']):>8}  {layout['memory_gib']:6.1f} GiB  "
        f"{layout['flags'] or '(as given)'}"
    )


def _count(number: float) -> str:
    if 1000 <= number < 10_000:
        return f"{number:,.0f}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"
