"""Time a run, ours or Hugging Face's, from inside: marks are read together, at the end."""

from __future__ import annotations

import functools
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.precision.precision import choose_precision
from rapidformer.benchmarking.job import PROFILED_STEPS, Job, Result, change_settings
from rapidformer.config import Settings
from rapidformer.context import get_args
from rapidformer.data.batch import describe_batch
from rapidformer.dist.collectives import gather_from_all
from rapidformer.dist.matrix_rate import measure_rank_rate
from rapidformer.dist.processes import describe_device
from rapidformer.errors import RapidformerError
from rapidformer.optim.observer import RunFinished, RunObserver, observe_runs
from rapidformer.overlay import find_fact


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
            matrix_rate=measure_rank_rate(device, dtype),
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
            raise RunFinished

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
            raise RunFinished
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
    with observe_runs(run):
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


_COUNTS = "rapidformer_counts"


@dataclass
class _Handover(RunObserver):
    """Takes the model, the data and the settings from a run."""

    job: Job
    args: Settings | None = None
    data: Any = None
    collate: Any = None
    model: nn.Module | None = None

    def change_settings(self, args: Settings) -> Settings:
        return change_settings(args, self.job)

    def see_training_data(self, dataset: Any, collate: Any) -> None:
        self.data, self.collate = dataset, collate

    def before_compose(self, model: nn.Module) -> None:
        self.model, self.args = model, get_args()
        raise RunFinished


def measure_trainer(job: Job, train: Callable[[], None]) -> Result:
    """Time Hugging Face's Trainer, with fused AdamW, on what ``train`` has built when it stops."""
    taken = _Handover(job)
    with observe_runs(taken):
        train()
    if taken.model is None or taken.data is None or taken.args is None:
        raise RapidformerError(
            "--against hf needs a run that builds its data loader with the engine before it "
            "composes its model, as a task, Finetuner, PreTrainer or Trainer does."
        )
    first = taken.collate([taken.data[0]]) if hasattr(taken.data, "__getitem__") else None
    if not isinstance(first, dict) or first.keys().isdisjoint(("labels", "start_positions")):
        raise RapidformerError(
            "--against hf needs batches with labels, so that the model computes its own loss. "
            "This run's batches have none."
        )
    return _train(job, taken.args, taken.model, taken.data, taken.collate)


def _train(job: Job, args: Settings, model: nn.Module, data: Any, collate: Any) -> Result:
    """Run the Trainer, and measure what ``BenchedRun`` does."""
    from transformers import Trainer, TrainingArguments

    class TimedTrainer(Trainer):
        def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            watch.begin_micro_batch(inputs.pop(_COUNTS), self.state.global_step)
            return super().training_step(model, inputs, *more, **options)

    arguments = TrainingArguments(**_translate(job, args))
    trainer = TimedTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=functools.partial(_collate_and_count, collate),
    )
    watch = _Stopwatch(job)
    trainer.train()
    device, counts = arguments.device, watch.counts
    watch.stop(device)
    return Result(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        device=describe_device(device), precision="", peak_memory=read_peak_memory(device),
        global_batch=args.global_batch_size or 0, first_step=watch.first_step,
        step_times=[watch.seconds / job.steps] * job.steps,
        rows=counts["rows"], tokens=counts["tokens"], slots=counts["slots"],
    )  # fmt: skip


def _collate_and_count(collate: Any, rows: Any) -> Any:
    """A batch with its counts, so that they need not be read from the device."""
    batch = collate(rows)
    info = describe_batch(batch)
    counts = {"rows": info.rows, "tokens": info.tokens, "slots": info.slots}
    return {**batch, _COUNTS: counts}


class _Stopwatch:
    """Times the steps after the warm-up."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began, self._timed_since = time.perf_counter(), 0.0
        self._last_step = -1
        self.first_step = self.seconds = 0.0
        self.counts = Counter[str]()

    def begin_micro_batch(self, counts: dict[str, int], step: int) -> None:
        """Called when a micro-batch of optimizer step ``step``, counted from 0, begins."""
        if step != self._last_step:
            self._last_step = step
            if step in (1, self._job.warm_up):
                wait_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            if step == 1:
                self.first_step = time.perf_counter() - self._began
            if step == self._job.warm_up:
                self._timed_since = time.perf_counter()
        if step >= self._job.warm_up:
            self.counts.update(counts)

    def stop(self, device: torch.device) -> None:
        wait_for(device)
        self.seconds = time.perf_counter() - self._timed_since


def _translate(job: Job, args: Settings) -> dict[str, Any]:
    """The run's settings under the Trainer's names."""
    has_gpu = torch.cuda.is_available()
    dtype = choose_precision(args.mixed_precision, torch.device("cuda" if has_gpu else "cpu")).dtype
    return {
        "output_dir": job.folder, "max_steps": job.warm_up + job.steps, "seed": args.seed,
        "per_device_train_batch_size": args.micro_batch_size or 8,
        "gradient_accumulation_steps": args.gradient_accumulation_steps or 1,
        "learning_rate": args.lr, "weight_decay": args.weight_decay,
        "max_grad_norm": args.clip_grad, "optim": "adamw_torch_fused",
        "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16,
        "torch_compile": job.peer == "hf-compile", "use_cpu": not has_gpu,
        "dataloader_num_workers": 2 * has_gpu if args.num_workers is None else args.num_workers,
        "logging_steps": args.log_interval or 10, "remove_unused_columns": False,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
