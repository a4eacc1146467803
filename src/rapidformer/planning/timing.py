"""How long an update takes: the work of one rank, divided by what its device reaches.

    kernels       products and attention / rate + bytes / bandwidth + a moment for each kernel
    micro-batch   the longest of kernels, their launches by the host and hidden exchanges,
                  + exchanges that nothing hides + copies to and from the host
    update        micro-batches x bubble of the pipeline + optimizer + gradients' exchange

The shares below were fitted to trainings on an H200 (BERT, GPT-2, Llama, T5, LoRA; docs/plan.md),
relative to what a large product and a large copy reach there. Those of links were not measured.
Without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rapidformer.config import Settings
from rapidformer.config.derive import get_batch_schedule
from rapidformer.config.sections import ParallelArguments, TrainingLengthArguments
from rapidformer.planning.devices import Cluster, Device
from rapidformer.planning.parts import Collective, Load, Shape, Work

_PRODUCTS = 0.75
"""Of the rate of a large product: products of all sizes."""
_ATTENTION = 2.25
"""The same of attention. Causal kernels skip half of the counted operations, and more is hidden."""
_FP8 = 0.54
"""Of the rate in fp8: scaling and casting included."""
_BYTES = 0.84
"""Of the rate of a large copy: kernels that compute little."""
_FUSED = 0.24
"""The part of those bytes that compiled blocks still move."""
_KERNEL = 3.9e-6
"""Seconds that each kernel takes beside its work."""
_LAUNCH = 45e-6
"""Seconds of the host for an operation of Python code, with its part of the backward pass."""
_COMPILED_LAUNCH = 0.25
"""The part of it that is left in compiled blocks."""
_LINK = 0.75
"""Of a link's rate: exchanges."""
_LATENCY = {"inside": 15e-6, "between": 40e-6}
"""Seconds of an exchange beside its bytes."""
_BUBBLE = {"zero-bubble": 1 / 3}
"""The part of the bubble that a schedule leaves."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of an update, and what follows from them."""

    step: float
    parts: dict[str, float]
    """Seconds by what takes them; hidden work is not among them."""
    tokens_per_second: float
    samples_per_second: float


def estimate(
    work: Work, settings: Settings, cluster: Cluster, precision: str, *, factor: float = 1.0
) -> Timing:
    """The time of an update; ``settings`` are resolved for the ranks of the cluster.

    ``factor``: how much longer the kernels of blocks take than they should (``compare_blocks``).
    """
    device = cluster.device
    blocks, rest = (
        _time_kernels(load, device, precision, is_compiled=settings.compile)
        for load in (work.blocks, work.rest)
    )
    kernels = {name: factor * seconds + rest[name] for name, seconds in blocks.items()}
    launch = _LAUNCH * (_COMPILED_LAUNCH if settings.compile else 1.0) * (not work.is_captured)
    launches = (work.blocks.operations + work.rest.operations) * launch
    exchanges = {
        (per, is_hidden): sum(
            _time_exchange(each, cluster, settings)
            for each in work.collectives
            if each.per == per and each.is_hidden == is_hidden
        )
        for per in ("micro_batch", "update")
        for is_hidden in (False, True)
    }
    computed = sum(kernels.values())
    # Work beside the kernels is shown only as far as it is longer than they are.
    waits = {
        "launching kernels": max(launches - computed, 0.0),
        "exchanges": exchanges["micro_batch", False]
        + max(exchanges["micro_batch", True] - max(computed, launches), 0.0),
        "copies to the host": max(work.host_bytes / (device.host * 1e9) - computed, 0.0),
    }
    count = work.micro_batches
    parts = {name: count * seconds for name, seconds in (kernels | waits).items()}
    last = computed * 2 / 3  # gradients travel during the last backward pass
    parts["exchanges"] += exchanges["update", False]
    parts["exchanges"] += max(exchanges["update", True] - last, 0.0)
    parts["pipeline bubble"] = sum(parts.values()) / count * _count_idle(work, settings)
    parts["optimizer"] = work.update_bytes / (device.copy_rate * _BYTES)
    parts["copies to the host"] += work.host_update_bytes / (device.host * 1e9)
    step = sum(parts.values())
    return Timing(
        step=step, parts={name: seconds for name, seconds in parts.items() if seconds},
        tokens_per_second=work.tokens / step, samples_per_second=work.samples / step,
    )  # fmt: skip


def compare_blocks(shape: Shape, device: Device) -> float | None:
    """How much longer blocks took on the device at hand than predicted; None if untimed."""
    measured = predicted = 0.0
    for group in shape.blocks:
        if group.timed is None:
            return None
        kernels = _time_kernels(group.timed.load, device, shape.precision)
        measured += group.count * group.timed.seconds
        predicted += group.count * sum(kernels.values())
    return measured / predicted if predicted else None


def _time_kernels(
    load: Load, device: Device, precision: str, *, is_compiled: bool = False
) -> dict[str, float]:
    """Of a micro-batch on the device."""
    rate = device.get_rate(precision)
    products = (load.matrix_flops - load.low_flops) / (rate * _PRODUCTS)
    if load.low_flops:
        products += load.low_flops / (device.get_rate("fp8") * _FP8)
    moved = load.moved * (_FUSED if is_compiled else 1.0)
    return {
        "products": products,
        "attention": load.attention_flops / (rate * _ATTENTION),
        "other kernels": moved / (device.copy_rate * _BYTES) + load.operations * _KERNEL,
    }


def _time_exchange(each: Collective, cluster: Cluster, settings: ParallelArguments) -> float:
    """Of all calls together."""
    if each.ranks < 2:
        return 0.0
    device, inner = cluster.device, _count_inner(each, settings)
    is_inside = inner * each.ranks <= device.per_node or cluster.nodes == 1
    # Ranks of one node that are in the same group each bring a link to the network.
    members = max(device.per_node // inner, 1)
    link = device.inside if is_inside else min(device.inside, device.between * members)
    share = (each.ranks - 1) / each.ranks
    factor = {"all_reduce": 2 * share, "send": 1.0}.get(each.kind, share)
    if each.kind == "all_to_all":
        factor /= each.ranks
    latency = _LATENCY["inside" if is_inside else "between"]
    return factor * each.size / (link * 1e9 * _LINK) + each.calls * latency


def _count_inner(each: Collective, settings: ParallelArguments) -> int:
    """How many ranks stand between neighbours of its axis: tensor is innermost."""
    tensor, context = settings.tensor_model_parallel_size, settings.context_parallel_size
    inner = {"tensor": 1, "context": tensor, "expert": tensor, "data": tensor * context}
    return inner.get(each.axis, tensor * context)


def _count_idle(work: Work, settings: ParallelArguments) -> float:
    """The micro-batches that a stage waits for at the start and at the end."""
    per_stage = settings.num_layers_per_virtual_pipeline_stage
    part = _BUBBLE.get(settings.pipeline_schedule or "", 0.5 if per_stage else 1.0)
    return (work.stages - 1) * part


# ---- the whole run ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Of all updates, without starting, evaluating and saving."""

    updates: int
    seconds: float
    device_hours: float


def estimate_run(
    timing: Timing, settings: TrainingLengthArguments, cluster: Cluster, samples: int
) -> RunTime | None:
    """None if the length of the run is not known; ``samples`` are the rows of its data."""
    updates = count_updates(settings, samples)
    if updates is None:
        return None
    seconds = updates * timing.step
    return RunTime(updates=updates, seconds=seconds, device_hours=seconds * cluster.count / 3600)


def count_updates(settings: TrainingLengthArguments, samples: int) -> int | None:
    """Of the run; a stream has no known length."""
    if settings.train_iters is not None:
        return settings.train_iters
    schedule = get_batch_schedule(settings)
    if settings.train_samples is not None:
        return schedule.count_updates(settings.train_samples)
    if not samples or settings.epochs is None:
        return None
    whole = int(settings.epochs) * schedule.count_updates(samples)
    part = settings.epochs - int(settings.epochs)
    return whole + (schedule.count_updates(math.ceil(part * samples)) if part else 0)


def describe_seconds(seconds: float) -> str:
    """Like ``41 ms``, ``12.5 s``, ``35 min``, ``3.2 h`` or ``4.1 days``."""
    steps: Iterable[tuple[float, float, str]] = (
        (1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h"),
        (math.inf, 86400, "days"),
    )  # fmt: skip
    unit, name = next((unit, name) for limit, unit, name in steps if seconds < limit)
    return f"{seconds / unit:.3g} {name}"
