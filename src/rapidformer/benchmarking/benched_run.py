"""Time a run from inside: the user's task, template or loop, stopped after a few steps.

The end of each part of a step is marked, on a GPU by an event; all are read at the end.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.benchmarking.job import PROFILED_STEPS, Job, Result, change_settings
from rapidformer.config import Settings
from rapidformer.dist.collectives import gather_from_all
from rapidformer.dist.matrix_rate import measure_rank_rate
from rapidformer.dist.processes import describe_device
from rapidformer.errors import RapidformerError
from rapidformer.optim.observer import RunObserver, observe_runs
from rapidformer.overlay import find_fact


class MeasuringFinished(BaseException):
    """Enough steps were timed. Not an Exception, so that the script does not catch it."""


class Clock:
    """Marks points in time, which are read together at the end."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        point: Any = time.perf_counter()
        if self._is_gpu:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        self._marks.append((name, point))

    def read(self) -> list[tuple[str, float]]:
        """Seconds from each mark to the next, under the later one's name."""
        if self._is_gpu:
            torch.cuda.synchronize()
        return [
            (name, start.elapsed_time(end) / 1000 if self._is_gpu else end - start)
            for (_, start), (name, end) in pairwise(self._marks)
        ]


class BenchedRun(RunObserver):
    """Times a run's steps: warm-up, then timed steps, then a few with a profiler on a GPU."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine: Any = None
        self._steps = 0
        self._last = 0
        """The last step to time, once it is known how long they take."""
        self._counts = Counter[str]()
        self._clock: Clock | None = None
        self._profiler: Any = None
        self._profiled_since = 0.0
        self._graphs_before = 0
        self._started_at = self._timed_since = 0.0
        self.result: Result | None = None

    def change_settings(self, args: Settings) -> Settings:
        return change_settings(args, self._job)

    def after_compose(self, engine: Any) -> None:
        self._engine = engine
        device, dtype = engine.device, engine.runtime.precision.dtype or torch.float32
        model: nn.Module = engine.model.parallelized.model
        topology = engine.runtime.topology
        self.result = Result(
            model=type(model).__name__.removeprefix("FSDP"),
            parameters=sum(p.numel() for p in model.parameters()),
            device=describe_device(device), precision=str(dtype).removeprefix("torch."),
            global_batch=engine.args.global_batch_size or 0, first_step=0.0,
            formula=engine.model.work.describe(),
            matrix_rate=measure_rank_rate(device, dtype, engine.args.world_size),
            is_counted=not any(map(topology.get_rank, ("tensor", "pipeline", "context"))),
        )  # fmt: skip
        self._started_at = time.perf_counter()

    def see_loss(
        self, loss: torch.Tensor, weight: float | torch.Tensor, info: Any, *, is_given: bool
    ) -> None:
        if self._clock is not None and info is not None:
            self._counts.update(
                rows=info.rows, tokens=info.tokens, slots=info.slots, labels=info.labels
            )

    def see_phase(self, phase: str) -> None:
        if self._clock is not None:
            self._clock.mark(phase)

    def see_update(self) -> None:
        assert self.result is not None
        self._steps += 1
        timed = self._steps - self._job.warm_up
        if self._steps == 1:
            wait_for(self._engine.device)
            self.result.first_step = time.perf_counter() - self._started_at
        if self._clock is not None:
            self._clock.mark("update")
        if timed == 0:
            wait_for(self._engine.device)
            self._graphs_before = self._count_graphs()
            self._clock = Clock(self._engine.device)
            self._clock.mark("update")
            self._timed_since = time.perf_counter()
        if timed == self._job.steps:
            if self._job.seconds:
                wait_for(self._engine.device)  # the host may be many steps ahead
            seconds = gather_from_all(time.perf_counter() - self._timed_since)
            self._last = self._job.count_steps(max(seconds))
        if timed == self._last > 0:
            self.read_times()
            self._start_profile()
        elif timed == self._last + PROFILED_STEPS and self._profiler is not None:
            self._read_profile()
            raise MeasuringFinished

    @property
    def has_enough_steps(self) -> bool:
        """Whether enough steps were timed, whose times have not been read yet."""
        return self._clock is not None and self._last > 0

    def read_times(self) -> None:
        """Complete the result; the steps after this are not timed."""
        assert self._clock is not None and self.result is not None
        result, counts = self.result, self._counts
        result.step_times, result.phases = split_steps(self._clock.read())
        result.rows, result.tokens, result.slots = counts["rows"], counts["tokens"], counts["slots"]
        result.operations = self._engine.model.work.count(
            tokens=result.tokens,
            targets=counts["labels"],
            rows=result.rows,
            is_packed=bool(self._engine.args.packing),
        )
        result.peak_memory = read_peak_memory(self._engine.device)
        result.graphs = self._count_graphs()
        result.late_graphs = result.graphs - self._graphs_before
        self._clock = None

    def _start_profile(self) -> None:
        if self._engine.device.type != "cuda":
            raise MeasuringFinished
        # Profile separate steps: the profiler slows down the host.
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()
        self._profiled_since = time.perf_counter()

    def _count_graphs(self) -> int:
        compiled = find_fact(self._engine.model.parallelized.model, CompiledBlocks)
        return compiled.graphs if compiled is not None else 0

    def _read_profile(self) -> None:
        assert self.result is not None
        wait_for(self._engine.device)
        seconds = time.perf_counter() - self._profiled_since
        self._profiler.stop()
        kernels = sum(event.self_device_time_total for event in self._profiler.key_averages())
        self.result.busy = min(kernels / 1e6 / seconds, 1.0)


def split_steps(marks: list[tuple[str, float]]) -> tuple[list[float], dict[str, float]]:
    """The duration of each step, and the total duration of each part of a step."""
    steps, phases, current = [], defaultdict[str, float](float), 0.0
    for name, seconds in marks:
        phases[name] += seconds
        current += seconds
        if name == "update":
            steps.append(current)
            current = 0.0
    return steps, dict(phases)


def measure_run(job: Job, train: Callable[[], None]) -> Result:
    """Run ``train`` until enough steps have been timed."""
    run = BenchedRun(job)
    with observe_runs(run), contextlib.suppress(MeasuringFinished):
        train()
    if run.has_enough_steps:
        run.read_times()  # the script trains for fewer steps than would be timed
    if run.result is None or not run.result.step_times:
        raise RapidformerError(
            f"the run ended before {job.warm_up + job.steps} optimizer steps. Check that it trains "
            "with an engine and has enough data, or set smaller --bench-steps and --bench-warmup."
        )
    return run.result


def read_peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
