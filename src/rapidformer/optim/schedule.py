"""The learning rate as a function of the samples seen, so it means the same for any batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.config.sections import OptimizerArguments
from rapidformer.errors import RapidformerError
from rapidformer.log import warn_once


@dataclass(frozen=True, kw_only=True)
class LearningRateCurve:
    """Learning rate relative to the peak, after a number of samples."""

    style: str
    warmup_samples: float
    decay_samples: float
    floor: float
    """The lowest rate as a fraction of the peak."""

    def __call__(self, samples: float) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return samples / self.warmup_samples
        if self.style == "constant":
            return 1.0
        if self.style == "inverse-square-root":
            start = max(self.warmup_samples, 1.0)
            return max(math.sqrt(start / max(samples, start)), self.floor)
        if samples > self.decay_samples:
            return self.floor
        span = self.decay_samples - self.warmup_samples
        done = (samples - self.warmup_samples) / span if span > 0 else 1.0
        fraction = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.floor + fraction * (1.0 - self.floor)


def build_curve(
    settings: OptimizerArguments, *, train_iters: int | None, count_samples: Callable[[int], int]
) -> LearningRateCurve:
    """The curve described by the flags; ``count_samples`` converts updates to samples."""
    style, length = settings.lr_decay_style, settings.lr_decay_iters or train_iters
    if length is None and settings.lr_decay_samples is None:
        lost = [f"does not decay ({style})"] if style in ("linear", "cosine") else []
        style = "constant" if lost else style
        lost += ["has no warm-up (--lr-warmup-fraction)"] if settings.lr_warmup_fraction else []
        if lost:
            warn_once(
                f"the length of the run is not known, so the learning rate {' and '.join(lost)}: "
                "give --train-iters, or --epochs and let the engine build the loader."
            )
    decay: float = count_samples(length or 0)
    if settings.lr_decay_samples is not None:
        decay = settings.lr_decay_samples
    if settings.lr_warmup_fraction:
        warmup = settings.lr_warmup_fraction * decay
    elif settings.lr_warmup_samples:
        warmup = settings.lr_warmup_samples
    else:
        warmup = count_samples(settings.lr_warmup_iters)
    if train_iters and warmup >= (samples := count_samples(train_iters)):
        warn_once(
            f"the warm-up takes the whole run (warm-up: {warmup:,.0f} samples, run: {samples:,} in "
            f"{train_iters:,} steps), so the learning rate never reaches --lr {settings.lr}: use a "
            "shorter one, such as --lr-warmup-fraction 0.1."
        )
    peak = settings.lr or 0.0
    return LearningRateCurve(
        style=style,
        warmup_samples=warmup,
        decay_samples=decay,
        floor=settings.min_lr / peak if peak else 0.0,
    )


def build_scheduler(
    optimizer: Optimizer,
    settings: OptimizerArguments,
    *,
    train_iters: int | None,
    count_samples: Callable[[int], int],
) -> LambdaLR:
    """A torch scheduler over the curve: one step per update."""
    curve = build_curve(settings, train_iters=train_iters, count_samples=count_samples)
    return LambdaLR(optimizer, lambda update: curve(count_samples(update)))


def fill_training_steps(
    function: functools.partial[Any], train_iters: int | None
) -> functools.partial[Any]:
    """``num_training_steps=args.train_iters`` is None in a run whose length is given in epochs."""
    if function.keywords.get("num_training_steps", 0) is not None:
        return function
    if train_iters is None:
        raise RapidformerError(
            "the learning-rate schedule needs the length of the run: give --train-iters, or "
            "--epochs and let the engine build or take the training loader first."
        )
    return functools.partial(function, num_training_steps=train_iters)
