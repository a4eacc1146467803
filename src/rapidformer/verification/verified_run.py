"""One run of a verification on one rank: the user's own, in fp32 and without dropout."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from rapidformer.accel.dropout_seeds import apply_no_dropout
from rapidformer.config import Settings
from rapidformer.errors import RapidformerError
from rapidformer.optim.observer import observe_runs
from rapidformer.verification.recorder import Recorder, RecordingFinished, collect_weights
from rapidformer.verification.settings import SMALLEST_EPSILON, Job, change_settings
from rapidformer.verification.trace import Trace

# Half of fp32's last bit.
_ROUND_OFF = 6e-8
# Gradients are clipped to this fraction of their norm, at most.
_CLIPPED = 0.5
# What a weight that decays loses in an update, at least.
_VISIBLE_DECAY = 1e-2


class VerifiedRun(Recorder):
    """Changes the settings as the job requires, and observes the updates."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.updates)
        self._job = job

    def change_settings(self, args: Settings) -> Settings:
        return change_settings(args, self._job)

    def before_compose(self, model: nn.Module) -> None:
        super().before_compose(model)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
            model.float()
        apply_no_dropout(model, changes_config=True)

    def after_compose(self, engine: Any) -> None:
        super().after_compose(engine)
        for group in engine.updates.optimizer.param_groups:
            if isinstance(group.get("eps"), float):
                group["eps"] = max(group["eps"], SMALLEST_EPSILON)
        apply_visible_decay(engine.updates.optimizer)
        if self._job.kind == "disturbed":
            # A forward pass without randomness is not affected.
            seed = engine.args.seed + 54321
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        if self._job.kind == "shaken":
            apply_round_off(self._model)

    def choose_clip(self, max_norm: float, norm: torch.Tensor) -> float:
        """Clip every gradient of a run that clips at all: one left out would not show otherwise."""
        asked = super().choose_clip(max_norm, norm)
        return min(asked, _CLIPPED * float(norm)) if asked > 0 else asked

    def see_update(self) -> None:
        # At every update: a short run may stop, and leave the other ranks, before the last one.
        self._engine.model.parallelized.settle()
        self.trace.weights = collect_weights(self._model)
        super().see_update()


def record_run(job: Job, train: Callable[[], None]) -> Trace:
    """Let ``train`` run until enough updates have been seen."""
    run = VerifiedRun(job)
    with observe_runs(run), contextlib.suppress(RecordingFinished):
        train()
    if not run.trace.gradients:
        raise RapidformerError(
            "the run ended before its first optimizer step: there is nothing to verify. Does it "
            "train with an engine (engine.backward and optimizer.step), on enough data for a step?"
        )
    if not any(rows for rows, _ in run.trace.samples) and run.trace.place["data"] == 0:
        raise RapidformerError(
            "the run's batches do not come from the engine, so one process would see other "
            "samples: use engine.data.build_loader(...), or pass the DataLoader to "
            "engine.compose(train_dataloader=...)."
        )
    return run.trace


def apply_round_off(model: nn.Module) -> None:
    """Change every weight in its last bits, to measure what round-off alone does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _ROUND_OFF
            parameter.mul_(1.0 + noise.to(parameter.device))


def apply_visible_decay(optimizer: Optimizer) -> None:
    """Let weights that decay do so visibly: at a usual rate, a few updates take millionths off.

    Only where an optimizer subtracts the decay on its own. Where Adam adds it to the gradient, a
    large decay would hide the gradient.
    """
    for group in optimizer.param_groups:
        rate, decay = float(group.get("initial_lr", group["lr"])), group.get("weight_decay", 0.0)
        is_apart = group.get("decoupled_weight_decay") is True or isinstance(optimizer, SGD)
        if rate > 0 and decay > 0 and is_apart:
            group["weight_decay"] = max(decay, _VISIBLE_DECAY / rate)
