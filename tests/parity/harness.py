"""Train a model under a layout, on several processes, and compare everything with one process.

The reference is a bare PyTorch loop over the same samples in one process, which knows nothing of
the library: it sees each global batch whole, padded to one length, and divides by its own count.
A test is a table: what is trained (``Training``), under which settings, within which limits.
Several cases go through one group of processes: starting a group costs more than training. What is
recorded, and how it is compared, is what ``rapidformer verify`` records and compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer.dist.processes import stop_processes
from rapidformer.engine import RapidformerEngine
from rapidformer.models.plan import shifts_labels
from rapidformer.optim.observer import observe_runs
from rapidformer.verification.compare import Comparison, compare
from rapidformer.verification.recorder import (
    Recorder,
    collect_gradients,
    collect_weights,
    count_bytes,
    find_ties,
)
from rapidformer.verification.trace import Trace, compute_losses
from tests.parity.models import GIVEN_PLANS, Rows, build_model, build_rows, collate
from tests.processes import run_in_processes

Settings = dict[str, Any]
RunEpoch = Callable[[RapidformerEngine, nn.Module, Any], None]
SETTINGS: Settings = {
    "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1, "clip_grad": 1.0, "seed": 5,
    "log_level": "error",
}  # fmt: skip
TENSOR = "tensor_model_parallel_size"
PIPELINE = "pipeline_model_parallel_size"


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Adam's default epsilon turns round-off in gradients near zero into whole steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)


def keep_rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def zero(stage: int, **more: Any) -> Settings:
    return {f"zero_{stage}_memory_optimization": True, **more}


# ---- what is trained -----------------------------------------------------------------------------


def run_updates(engine: RapidformerEngine, model: nn.Module, loader: Any) -> None:
    """An epoch as the library's loops do it, in stages or not; labels are counted here."""
    forward = make_forward(model)
    for update in engine.iterate_updates(loader):
        engine.run_update(forward, update)
        engine.step()


def run_own_loop(engine: RapidformerEngine, model: nn.Module, loader: Any) -> None:
    """An epoch as users write it; the engine counts the labels."""
    for batch in loader:
        engine.backward(model(**batch)["loss"])
        engine.step()


@dataclass(frozen=True)
class Training:
    """A training whose result must not depend on the layout."""

    model: str
    layers: int = 2
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_sgd
    rows: int = 24
    global_batch_size: int = 8
    epochs: int = 1
    clip_grad: float = 1.0
    is_shuffled: bool = False
    is_by_row: bool = False
    """Whether the bare loop adds up single rows. A mixture of experts has a loss over its
    micro-batch, so the reference must have the same micro-batches as the processes."""
    run_epoch: RunEpoch = run_updates
    recorder: type[Recorder] = Recorder

    def get_settings(self, settings: Settings) -> Settings:
        own = {"global_batch_size": self.global_batch_size, "clip_grad": self.clip_grad}
        return {**SETTINGS, **own, **settings}

    def build_model(self) -> nn.Module:
        return build_model(self.model, layers=self.layers)

    def build_rows(self) -> Rows:
        return build_rows(self.model, self.rows)


Case = tuple[Training, Settings]


def under(settings: Settings, *models: str, **more: Any) -> list[Case]:
    """A case for each model."""
    return [(Training(model, **more), settings) for model in models]


# ---- one process, without the library ------------------------------------------------------------


@functools.cache
def run_one(training: Training) -> Trace:
    """The bare loop; tests share it, so nobody may change what it returns."""
    updates = [
        [[row] for row in rows] if training.is_by_row else [rows] for rows in cut_updates(training)
    ]
    model = training.build_model()
    return run_bare(model, updates, training.make_optimizer, training.clip_grad)


def cut_updates(training: Training) -> list[Rows]:
    """The global batches of all epochs; the last one of an epoch may be smaller."""
    rows, size = training.build_rows(), training.global_batch_size
    if training.is_shuffled:
        return [[rows[i] for i in indices] for indices in get_order(training)]
    starts = range(0, len(rows), size)
    return [rows[start : start + size] for start in starts] * training.epochs


def get_order(training: Training) -> list[list[int]]:
    """The samples of every global batch, as a loader in one process shuffles them."""
    size = training.global_batch_size
    engine = RapidformerEngine(args=training.get_settings({"micro_batch_size": size}))
    numbers = list(range(training.rows))
    loader = engine.build_data_loader(numbers, torch.tensor, shuffle=True)
    return [batch.tolist() for _ in range(training.epochs) for batch in loader]


def run_bare(
    model: nn.Module,
    updates: list[list[Rows]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip: float = 1.0,
) -> Trace:
    """What every parity test compares with: a loop of torch, in one process, without the library.

    An update is its micro-batches; mostly it is one, the whole global batch.
    """
    optimizer = make_optimizer(model)
    trace = start_bare_trace(model)
    trace.facts["parameter_bytes"] = count_bytes(model)
    model.train()
    for micro_batches in updates:
        loss = _accumulate(model, [collate(rows) for rows in micro_batches])
        note_bare_gradients(trace, model, loss)
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = collect_weights(model)
    return trace


def _accumulate(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The backward pass of an update; its loss, a mean over its labels."""
    if len(batches) == 1:
        loss: torch.Tensor = model(**batches[0])["loss"]
        loss.backward()
        return loss
    loss_sum, count = torch.zeros(()), 0
    for batch in batches:
        weight = count_labels(batch["labels"], is_shifted=True)
        if weight:
            loss = model(**batch)["loss"] * weight
            loss.backward()
            loss_sum, count = loss_sum + loss.detach(), count + weight
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    return loss_sum / count


def count_labels(labels: torch.Tensor, *, is_shifted: bool) -> int:
    return int(((labels[:, 1:] if is_shifted else labels) != -100).sum())


def start_bare_trace(model: nn.Module) -> Trace:
    """What stands before the first update of a loop without the library."""
    return Trace(start=collect_weights(model), ties=find_ties(model))


def note_bare_gradients(trace: Trace, model: nn.Module, loss: torch.Tensor) -> None:
    """Take down an update of such a loop, before it clips."""
    trace.losses.append((loss.item(), 1.0))
    trace.samples.append((0, 0))
    trace.gradients.append(collect_gradients(model))


# ---- several processes, through the engine -------------------------------------------------------


def run_cases(cases: list[Case]) -> list[Trace]:
    """One after the other; called in every process."""
    torch.set_num_threads(1)
    traces = [run_case(training, settings) for training, settings in cases]
    stop_processes()
    return traces


def run_case(training: Training, settings: Settings) -> Trace:
    """One training; the processes stay together for the next one."""
    engine, model, loader = compose(training, settings)
    recorder = training.recorder()
    return train(engine, model, loader, recorder, training.epochs, training.run_epoch)


def compose(training: Training, settings: Settings) -> tuple[RapidformerEngine, nn.Module, Any]:
    engine = RapidformerEngine(args=training.get_settings(settings))
    model = training.build_model()
    loader = engine.build_data_loader(
        training.build_rows(), collate, shuffle=training.is_shuffled, is_training=True
    )
    plan = GIVEN_PLANS.get(training.model)
    model, *_ = engine.compose(model, training.make_optimizer(model), keep_rate, plan=plan)
    return engine, model, loader


def train(
    engine: RapidformerEngine,
    model: nn.Module,
    loader: Any,
    recorder: Recorder | None = None,
    epochs: int = 1,
    run_epoch: RunEpoch = run_updates,
) -> Trace:
    """Train a composed model, and record it."""
    recorder = recorder or Recorder()
    model.train()
    with observe_runs(recorder):
        recorder.after_compose(engine)
        for _ in range(epochs):
            run_epoch(engine, model, loader)
    return recorder.finish()


def make_forward(model: nn.Module) -> Callable[[Any], Any]:
    """The loss of a batch, and the labels it is a mean over."""
    is_shifted = shifts_labels(model) or "GPT" in type(model).__name__

    def forward(batch: Any) -> tuple[torch.Tensor, float]:
        labels = batch["labels"]
        loss = model(**batch)["loss"]
        return loss, count_labels(labels, is_shifted=is_shifted and labels.dim() > 1)

    return forward


# ---- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """How far a run may be from the reference; at its first update, how far at most."""

    all: Mapping[str, float]
    first: Mapping[str, float]
    """Before round-off has gone through an update, less is allowed."""


ALL = {"loss": 1e-6, "gradient norm": 1e-5, "gradients": 1e-5, "updated weights": 1e-5}
"""The contract is 1e-5 of everything, over ten updates."""
FIRST = {"loss": 1e-6, "gradient norm": 1e-6, "gradients": 5e-6}
LIMITS = Limits(ALL, FIRST)
WHOLE_LIMITS = Limits(ALL, {**FIRST, "gradients": 1e-6})
"""Where every process computes whole layers."""
STAGE_LIMITS = Limits({**ALL, "gradient norm": 1e-6, "updated weights": 5e-6}, FIRST)
SHARD_LIMITS = Limits({**STAGE_LIMITS.all, "gradients": 5e-6}, FIRST)


def check(
    world_size: int, cases: list[Case], limits: Limits = LIMITS, *, are_copies_equal: bool = False
) -> list[list[Trace]]:
    """Compare what the processes have with one process; returns their traces, case by case."""
    everyone = run_on(world_size, cases)
    for (training, settings), traces in zip(cases, everyone, strict=True):
        check_case(training, traces, limits, where=f"{training.model} under {settings}")
        if are_copies_equal and TENSOR not in settings:
            check_copies(traces)
    return everyone


def run_on(world_size: int, cases: list[Case]) -> list[list[Trace]]:
    """The traces of every case, one for each process."""
    if world_size == 1:
        return [[trace] for trace in run_cases(cases)]
    return [
        list(traces) for traces in zip(*run_in_processes(run_cases, world_size, cases), strict=True)
    ]


def check_case(
    training: Training, traces: list[Trace], limits: Limits = LIMITS, *, where: str = ""
) -> None:
    reference = run_one(training)
    check_equal(reference, traces, limits, where=where)
    assert _get_gradient_names(traces) == _get_gradient_names([reference]), where
    assert get_ties(traces) == get_ties([reference]), where


def _get_gradient_names(traces: list[Trace]) -> set[str]:
    return {name for trace in traces for name in trace.gradients[0]}


def get_ties(traces: list[Trace]) -> set[tuple[str, ...]]:
    return {tuple(group) for trace in traces for group in trace.ties}


def check_equal(
    reference: Trace, traces: list[Trace], limits: Limits = WHOLE_LIMITS, *, where: str = ""
) -> Comparison:
    """Every process's view beside one process: all updates, and the first one more strictly."""
    comparison = compare(reference, traces, limits.all)
    assert comparison.is_equal, f"{where}: {comparison.describe_failures()}"
    first = compare(take_first(reference), [take_first(trace) for trace in traces], limits.first)
    assert first.is_equal, f"{where}, at the first update: {first.describe_failures()}"
    return comparison


def check_copies(traces: list[Trace]) -> None:
    """What several processes hold is the same on all of them, bit for bit.

    Not where layers are split: sums over processes round differently on each.
    """
    first: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for trace in traces:
        assert trace.norms == traces[0].norms
        for kind, tensors in (("gradient", trace.gradients[0]), ("weight", trace.weights)):
            for name, value in tensors.items():
                assert np.array_equal(first.setdefault((kind, name), value), value), (kind, name)
    for rank in {trace.place["data"] for trace in traces}:
        losses = [trace.losses for trace in traces if trace.place["data"] == rank]
        assert all(each == losses[0] for each in losses)


def take_first(trace: Trace) -> Trace:
    """The first update alone."""
    parts = {name: getattr(trace, name)[:1] for name in ("losses", "samples", "norms", "gradients")}
    return replace(trace, **parts, weights=trace.start)


def get_losses(*traces: Trace) -> list[float]:
    """The mean loss of every update; needs the trace of every data-parallel rank."""
    return compute_losses(list(traces))[0]


def get_bytes(trace: Trace) -> int:
    """Of the parameters, in this process."""
    return int(trace.facts["parameter_bytes"])
