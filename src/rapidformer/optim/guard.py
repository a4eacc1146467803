"""Find updates whose loss or gradient is not finite, or far above the recent ones.

The verdict comes from values summed over all ranks, so all ranks agree on it. It is computed on the
device, where a fused optimizer obeys it. The host reads it one update late, when the next forward
and backward passes are queued: no step waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rapidformer.compat.torch_optimizers import obeys_flags, step_unless
from rapidformer.dist.collectives import broadcast_object, is_alone
from rapidformer.dist.topology import Topology
from rapidformer.errors import TrainingError, list_some

WINDOW = 64
"""How many good updates the median is taken over."""
LEAST = 16
"""How many there must be before anything counts as a spike."""
_MOST_NAMED = 64
"""Samples that a line of the log names; ``metrics.jsonl`` has all of them."""


@dataclass(frozen=True)
class BadUpdate:
    """An update that must not stay in the weights."""

    loss: float
    norm: float
    reason: str


class RecentValues:
    """Losses and gradient norms of the last good updates, and what would be a spike among them."""

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._values: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, loss: float, norm: float) -> None:
        self._values.append((loss, norm))

    def get_limits(self) -> tuple[float, float]:
        """The largest loss and norm that are not spikes; infinite while too little is known."""
        if self._threshold is None or len(self._values) < LEAST:
            return math.inf, math.inf
        loss, norm = (median(values) for values in zip(*self._values, strict=True))
        # A multiple says nothing about losses around zero.
        most_loss = self._threshold * loss if loss > 0 else math.inf
        return most_loss, self._threshold * norm if norm > 0 else math.inf

    def find_problem(self, loss: float, norm: float, *, tolerates_infinity: bool) -> str | None:
        """What is wrong with an update; None if nothing is."""
        most_loss, most_norm = self.get_limits()
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            # Under fp16, gradient overflows are normal: the scaler skips that update.
            return None if tolerates_infinity else f"the gradient is {norm}"
        if loss > most_loss:
            return f"the loss is {loss:.4g}, above {self._threshold:g} times its recent median"
        if norm > most_norm:
            what = f"the gradient norm is {norm:.4g}"
            return f"{what}, above {self._threshold:g} times its recent median"
        return None

    def state_dict(self) -> list[tuple[float, float]]:
        return list(self._values)

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        self._values = deque(((float(a), float(b)) for a, b in state), maxlen=WINDOW)


class LossGuard:
    """Judges each update before the optimizer uses it."""

    def __init__(
        self,
        recent: RecentValues,
        model: nn.Module,
        optimizer: Optimizer,
        topology: Topology,
        device: torch.device,
        *,
        prevents: bool,
    ) -> None:
        """``prevents``: a bad update must leave no trace; otherwise the caller restores weights."""
        self.recent = recent
        self.is_late = False
        """Whether the caller reads the verdict one update late (``settle``)."""
        self._optimizer = optimizer
        self._device = device
        self._prevents = prevents
        self._ranks = 1 if is_alone() else dist.get_world_size()
        # Ranks that share samples have each computed the same loss.
        self._sharers = self._ranks / topology.num_replicas
        self._loss: float | torch.Tensor = 0.0
        self._verdict: _Reading | None = None
        self._flag = torch.zeros((), device=device)
        self._tolerates_infinity = False
        names = {"running_mean", "running_var", "num_batches_tracked"} if prevents else set()
        self._statistics = [b for name, b in model.named_buffers() if name.split(".")[-1] in names]
        """The running statistics of the model's batch norms."""
        self._kept = [tensor.clone() for tensor in self._statistics]

    @property
    def can_be_late(self) -> bool:
        """Whether a bad update does no harm until its verdict is read."""
        return not self._prevents or obeys_flags(self._optimizer)

    @property
    def is_pending(self) -> bool:
        return self._verdict is not None

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's loss, already multiplied by its fraction of the update."""
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        self._loss = self._loss + whole.float()

    def judge(
        self, norm: torch.Tensor, total: float | torch.Tensor, *, tolerates_infinity: bool
    ) -> None:
        """Start the verdict on a finished gradient; every rank must call this."""
        loss = torch.as_tensor(self._loss / total, device=self._device, dtype=torch.float32)
        values = torch.stack([loss / self._sharers, norm.to(self._device).float() / self._ranks])
        self._loss = 0.0
        if self._ranks > 1:
            dist.all_reduce(values)
        most_loss, most_norm = self.recent.get_limits()
        loss, norm = values[0], values[1]
        is_overflow = ~norm.isfinite()
        is_bad = ~loss.isfinite() | (loss > most_loss) | ((norm > most_norm) & ~is_overflow)
        if not tolerates_infinity:
            is_bad |= is_overflow
        self._flag = is_bad.float()
        self._tolerates_infinity = tolerates_infinity
        self._verdict = _Reading(torch.cat([values, self._flag.reshape(1)]))
        # A forward pass changes the running statistics of batch norms: take a bad one's back.
        for kept, tensor in zip(self._kept, self._statistics, strict=True):
            kept.copy_(torch.where(self._flag > 0, kept, tensor))
            tensor.copy_(kept)

    def run_step(self, step: Callable[[], object]) -> None:
        """The optimizer's step, without effect if the verdict is bad and nobody has read it yet."""
        if self.is_late and self._prevents:
            step_unless(self._flag, self._optimizer, step)
        else:
            step()

    def settle(self) -> BadUpdate | None:
        """Read the verdict; None if the update was good."""
        assert self._verdict is not None
        loss, norm, is_bad = self._verdict.read()
        self._verdict = None
        if not is_bad:
            if math.isfinite(norm):
                self.recent.add(loss, norm)
            return None
        reason = self.recent.find_problem(loss, norm, tolerates_infinity=self._tolerates_infinity)
        return BadUpdate(loss, norm, reason or "the loss or the gradient is far above the others")

    def forget(self) -> None:
        """Start over with restored weights: nothing was added or judged yet."""
        self._loss, self._verdict = 0.0, None
        for kept, tensor in zip(self._kept, self._statistics, strict=True):
            kept.copy_(tensor)


class _Reading:
    """Numbers on their way from the device; only ``read`` waits for them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def describe_bad_batch(reason: str, step: int, samples: Sequence[int]) -> str:
    """What is wrong at which step, and the numbers of the batch's samples in the data set."""
    if not samples:
        return f"{reason} at step {step}"
    return f"{reason} at step {step} (samples {list_some(list(map(str, samples)), _MOST_NAMED)})"


@dataclass(eq=False, kw_only=True)
class LossScaler:
    """Keeps fp16 gradients in range: a fixed factor, or one that adapts."""

    fixed: float | None = None
    initial: float = 2.0**16
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    weight_unit: float | None = None
    """The unit for loss weights when several ranks add them: close to a typical weight, so that
    many labels do not use up fp16's range. A power of two, so it changes no bits."""

    def __post_init__(self) -> None:
        self.scale = self.fixed if self.fixed is not None else self.initial
        self._patience, self._clean_updates = self.hysteresis, 0

    def agree_on_unit(self, weight: float) -> None:
        """Use the first rank's current weight; every rank must call this."""
        self.weight_unit = broadcast_object(2.0 ** round(math.log2(max(weight, 1.0))))

    def update(self, *, overflowed: bool) -> None:
        """Halve after too many overflows, double after enough steps without one."""
        if self.fixed is not None:
            return
        if overflowed:
            self._clean_updates = 0
            self._patience -= 1
            if self.scale <= self.minimum:
                raise TrainingError(
                    f"the gradient is not finite although the loss scale is {self.scale:g}: this "
                    "is not an fp16 overflow. Check the data and the loss, or lower --lr."
                )
            if self._patience <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._clean_updates += 1
        if self._clean_updates == self.window:
            self._clean_updates = 0
            self._patience = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "patience": self._patience,
            "clean_updates": self._clean_updates,
            "weight_unit": self.weight_unit or 0.0,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.fixed is not None:
            return  # a fixed scale given now applies, whatever the checkpoint had
        self.scale = float(state["scale"])
        self._patience = int(state["patience"])
        self._clean_updates = int(state["clean_updates"])
        self.weight_unit = state.get("weight_unit") or None
