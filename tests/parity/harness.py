"""Train a model under a layout, on several processes, and compare everything with one process.

The reference is a bare PyTorch loop over the same samples in one process, which knows nothing of
the library: it sees each global batch whole, padded to one length, and divides by its own count.
A test is a table: what is trained (``Training``), under which settings, within which limits.
Several cases go through one group of processes: starting a group costs more than training. What is
recorded, and how it is compared, is what ``rapidformer verify`` records and compares.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rapidformer.dist.processes import stop_processes
from rapidformer.engine import RapidformerEngine
from rapidformer.models.adapters import find_adapter
from rapidformer.models.own_loss import shifts_labels
from rapidformer.optim.observer import observe_runs
from rapidformer.verification.recorder import Recorder
from rapidformer.verification.trace import Trace
from tests.parity.bare import count_labels, run_bare
from tests.parity.limits import (
    LIMITS,
    Limits,
    check_copies,
    check_equal,
    get_gradient_names,
    get_ties,
)
from tests.parity.models import GIVEN_PLANS, Rows, build_model, build_rows, collate
from tests.processes import run_in_kept_processes

Settings = dict[str, Any]
RunEpoch = Callable[[RapidformerEngine, nn.Module, Any], None]
SETTINGS: Settings = {
    "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1, "clip_grad": 1.0, "seed": 5,
    "log_level": "error",
}  # fmt: skip
PADDED: Settings = {**SETTINGS, "dynamic_shape": "off"}
UNPADDED: Settings = {"dynamic_shape": "auto"}
"""As users have it: padding is removed where a proof says that it may be. That proof takes as long
as a training of two updates, so each way of sharing has it in its table of models, and in a case or
two beside; the others are ``PADDED``. test_unpad*.py are about nothing else."""
SHORT = 6
"""Rows of a single update. Whether a way of sharing starts the second one well, one model shows;
what another architecture could get wrong shows in the first."""
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
    for update in engine.data.iterate_updates(loader):
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
    rows: int = 12
    global_batch_size: int = 8
    """Two updates: the second one starts from weights and momentum of the first, and is smaller.

    With ``SHORT`` rows, it is a smaller one alone.
    """
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
        is_shared = int(os.environ.get("WORLD_SIZE", 1)) == settings.get(TENSOR)
        if is_shared and not self.is_by_row:
            own["micro_batch_size"] = self.global_batch_size // 2  # all processes see all rows
        return {**PADDED, **own, **settings}

    def build_model(self) -> nn.Module:
        return build_model(self.model, layers=self.layers)

    def build_rows(self) -> Rows:
        return build_rows(self.model, self.rows)


Case = tuple[Training, Settings]


def under(settings: Settings, *models: str, **more: Any) -> list[Case]:
    """A case for each model; the first is trained for two updates, the others for one."""
    first, *others = models
    cases = [(Training(first, **more), settings)]
    return cases + [(Training(name, **{"rows": SHORT, **more}), settings) for name in others]


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
    loader = engine.data.build_loader(numbers, torch.tensor, shuffle=True)
    return [batch.tolist() for _ in range(training.epochs) for batch in loader]


# ---- several processes, through the engine -------------------------------------------------------


def run_cases(cases: list[Case]) -> list[Trace]:
    """One after the other; called in every process."""
    torch.set_num_threads(1)
    return [run_case(training, settings) for training, settings in cases]


def run_case(training: Training, settings: Settings) -> Trace:
    """One training; the processes stay together for the next one."""
    engine, model, loader = compose(training, settings)
    recorder = training.recorder()
    return train(engine, model, loader, recorder, training.epochs, training.run_epoch)


def compose(training: Training, settings: Settings) -> tuple[RapidformerEngine, nn.Module, Any]:
    engine = RapidformerEngine(args=training.get_settings(settings))
    model = training.build_model()
    loader = engine.data.build_loader(
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
    adapter = find_adapter(model)
    if adapter is not None and adapter.prepends_tokens:
        is_shifted = False  # the last learned token predicts a row's first label

    def forward(batch: Any) -> tuple[torch.Tensor, float]:
        labels = batch["labels"]
        loss = model(**batch)["loss"]
        return loss, count_labels(labels, is_shifted=is_shifted and labels.dim() > 1)

    return forward


# ---- comparing -----------------------------------------------------------------------------------


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
        alone = run_cases(cases)
        stop_processes()
        return [[trace] for trace in alone]
    everyone = run_in_kept_processes(run_cases, world_size, cases)
    return [list(traces) for traces in zip(*everyone, strict=True)]


def check_case(
    training: Training, traces: list[Trace], limits: Limits = LIMITS, *, where: str = ""
) -> None:
    reference = run_one(training)
    check_equal(reference, traces, limits, where=where)
    assert get_gradient_names(traces) == get_gradient_names([reference]), where
    assert get_ties(traces) == get_ties([reference]), where
