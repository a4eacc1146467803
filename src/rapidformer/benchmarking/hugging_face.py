"""Time Hugging Face's Trainer with the same model, data and settings, to compare with.

The user's run starts as usual and is interrupted once it has its data and its model, which are then
given to the Trainer. It gets what makes it fast: fused AdamW and, on request, ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rapidformer.accel.precision.precision import choose_precision
from rapidformer.benchmarking.benched_run import read_peak_memory, wait_for
from rapidformer.benchmarking.job import Job, Result, change_settings
from rapidformer.config import Settings
from rapidformer.context import get_args
from rapidformer.data.batch import describe_batch
from rapidformer.dist.processes import describe_device
from rapidformer.errors import RapidformerError
from rapidformer.optim.observer import RunObserver, observe_runs

_COUNTS = "rapidformer_counts"


class _HandedOver(BaseException):
    """The run has built what is needed. Not an Exception, so that the script does not catch it."""


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
        raise _HandedOver


def measure_trainer(job: Job, train: Callable[[], None]) -> Result:
    """Time Hugging Face's Trainer on what ``train`` would train."""
    taken = _Handover(job)
    with observe_runs(taken), contextlib.suppress(_HandedOver):
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
        model=model,  # type: ignore[arg-type]
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
