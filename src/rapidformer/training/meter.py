"""What the loop measures between two log lines, without ever waiting for the device.

Losses and norms stay on the device as one small tensor per update; at a log interval they are
reduced over the ranks together and read once. So a NaN loss is found with its exact step, although
nobody looked when it happened. ``LogLines`` makes the figures of a line from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from rapidformer.data.batch import BatchInfo
from rapidformer.data.update import Mean
from rapidformer.dist.collectives import sum_over_replicas
from rapidformer.dist.matrix_rate import measure_rank_rate
from rapidformer.dist.topology import Topology
from rapidformer.engine import RapidformerEngine
from rapidformer.log import warn_once

_DECAY = 0.9
"""Weight of the past in a live loss: the mean covers about ten updates."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One log interval."""

    losses: list[float]
    parts: dict[str, float]
    """The parts of the loss by name, as means over the interval."""
    norms: list[float]
    seconds: float
    tokens: int
    slots: int
    samples: int
    labels: int

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class WeightedSums:
    """Sums of means times their weights, by name, which become means over everything."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, float | torch.Tensor] = {}
        self._dtype = dtype

    def add(self, means: Mapping[str, Mean]) -> None:
        for name, (mean, weight) in means.items():
            # A mean over no labels is NaN, and must not enter the total.
            counts = isinstance(weight, torch.Tensor) or bool(weight)
            value = mean.detach().to(self._dtype or mean.dtype)
            # Zero if it does not count: every rank must have every name.
            part = value * weight if counts else torch.zeros_like(value)
            if isinstance(weight, torch.Tensor):
                part = torch.where(weight == 0, torch.zeros_like(part), part)
            self.sums[name] = self.sums[name] + part if name in self.sums else part
            self.weights[name] = self.weights.get(name, 0.0) + (weight if counts else 0.0)

    def read_means(self, topology: Topology) -> dict[str, float]:
        pairs = [(self.sums[name], self.weights[name]) for name in self.sums]
        named = zip(self.sums, _sum_pairs(pairs, topology), strict=True)
        return {name: total / count if count else math.nan for name, (total, count) in named}


class Meter:
    """Collects micro-batches and updates until they are read."""

    def __init__(
        self, device: torch.device, topology: Topology, *, live: bool = False,
        set_losses: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """``set_losses`` are the parts that are the losses of a mixture's sets."""
        self._device = device
        self._set_losses = set_losses
        self._topology = topology
        self.live_loss = LiveLoss(device) if live else None
        self._update = WeightedSums()
        self.all_tokens = self.all_slots = 0
        """Tokens of the run on this process, without and with padding."""
        self._start()

    def _start(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._parts: dict[str, list[Mean]] = {}
        self._norms: list[torch.Tensor] = []
        self._rows = self._tokens = self._slots = self._labels = 0
        self._since = time.perf_counter()

    def add_micro_batch(self, means: Mapping[str, Mean], info: BatchInfo) -> None:
        """Add the ``loss`` and its parts."""
        self._update.add(means)
        self._rows += info.rows
        self._tokens += info.tokens
        self._slots += info.slots
        self.all_tokens += info.tokens
        self.all_slots += info.slots
        self._labels += info.labels

    def add_update(self, total_weight: float | torch.Tensor, norm: torch.Tensor | None) -> None:
        """Close an update: its loss is the mean over the whole global batch."""
        sums, weights = self._update.sums, self._update.weights
        weight = weights.get("loss", 0.0)
        if self.live_loss is not None and (isinstance(weight, torch.Tensor) or weight):
            self.live_loss.add(sums["loss"] / weight)
        loss = sums.pop("loss", torch.zeros((), device=self._device))
        self._losses.append((loss / total_weight).float())
        for name, total in sums.items():
            self._parts.setdefault(name, []).append((total, weights[name]))
        self._norms.append(norm if norm is not None else torch.zeros((), device=self._device))
        self._update = WeightedSums()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count as training."""
        paused_at = time.perf_counter()
        yield
        self._since += time.perf_counter() - paused_at

    def has_updates(self) -> bool:
        return bool(self._losses)

    def drop_update(self) -> None:
        """Take back the loss of the last update, which was skipped; its samples were consumed."""
        self._losses.pop()
        self._norms.pop()
        for pairs in self._parts.values():
            pairs.pop()

    def reset(self) -> None:
        """Forget everything since the last reading."""
        self._start()
        self._update = WeightedSums()

    def read(self) -> Measurement:
        """Reduce, read and reset."""
        updates = len(self._losses)
        losses = torch.stack(self._losses)
        numbers = [self._labels, self._rows, self._tokens, self._slots]
        counts = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        norms = torch.stack(self._norms).float() if self._norms else losses.new_zeros(1)
        # Ranks with slices of the same sequences have each counted the same rows.
        counts /= self._topology.context
        packed = sum_over_replicas(torch.cat([losses.double(), counts]), self._topology)
        values: list[float] = packed.tolist()
        labels, samples, tokens, slots = map(round, values[-4:])
        measurement = Measurement(
            losses=values[:updates], parts=self._read_parts(values[:updates]), norms=norms.tolist(),
            seconds=time.perf_counter() - self._since,
            labels=labels, samples=samples, tokens=tokens, slots=slots,
        )  # fmt: skip
        self._start()
        return measurement

    def _read_parts(self, losses: Sequence[float]) -> dict[str, float]:
        """Means over the updates that have something to count; every rank must call this."""
        flat = [pair for pairs in self._parts.values() for pair in pairs]
        totals = iter(_sum_pairs(flat, self._topology))
        parts, of_sets = {}, {}
        for name, pairs in self._parts.items():
            sums = list(islice(totals, len(pairs)))
            if name in self._set_losses:
                of_sets[name] = sums
                continue
            means = [total / weight for total, weight in sums if weight]
            parts[name] = sum(means) / len(means) if means else 0.0
        return {**parts, **self._join_sets(of_sets, losses)}

    def _join_sets(
        self, of_sets: Mapping[str, list[tuple[float, float]]], losses: Sequence[float]
    ) -> dict[str, float]:
        """The losses of sets over the whole interval, if they add up to the loss."""
        updates = [
            list(map(sum, zip(*pairs, strict=True)))
            for pairs in zip(*of_sets.values(), strict=True)
        ]
        is_whole = len(updates) == len(losses) and all(
            math.isclose(total / max(weight, 1), loss, rel_tol=1e-3, abs_tol=1e-5)
            for (total, weight), loss in zip(updates, losses, strict=True)
            if math.isfinite(loss)
        )
        if not is_whole and self._set_losses:
            warn_once(
                "the loss of each data set is not shown: this task's loss is not a mean over rows, "
                "or has other parts."
            )
            return {}
        pooled = {name: list(map(sum, zip(*sums, strict=True))) for name, sums in of_sets.items()}
        return {name: total / weight for name, (total, weight) in pooled.items() if weight}


def _sum_pairs(pairs: list[Mean], topology: Topology) -> list[tuple[float, float]]:
    """Sums and their weights, each over all ranks, in one message; waits for the device."""
    if not pairs:
        return []
    sums = torch.stack([total for total, _ in pairs]).double()
    weights = torch.tensor([float(weight) for _, weight in pairs], dtype=sums.dtype).to(sums.device)
    totals, counts = sum_over_replicas(torch.stack([sums, weights]), topology).tolist()
    return list(zip(totals, counts, strict=True))


class LiveLoss:
    """A running mean of this rank's losses."""

    def __init__(self, device: torch.device) -> None:
        self._mean = self._weight = 0.0
        self._is_async = device.type == "cuda"
        if self._is_async:
            self._slot = torch.zeros((), device="cpu", pin_memory=True)
            self._copied = torch.cuda.Event()
            self._is_copying = False

    @property
    def value(self) -> float | None:
        """The mean so far; None before the first loss has arrived."""
        return self._mean / self._weight if self._weight else None

    def add(self, loss: torch.Tensor) -> None:
        """Add an update's loss; on a GPU it arrives one update later, or is skipped."""
        if not self._is_async:
            self._take(float(loss))
        elif not self._is_copying or self._copied.query():
            if self._is_copying:
                self._take(float(self._slot))
            self._slot.copy_(loss.float(), non_blocking=True)
            self._copied.record()
            self._is_copying = True

    def _take(self, loss: float) -> None:
        # A NaN loss ends the run when the meter is read; the bar need not show it.
        if math.isfinite(loss):
            self._mean = _DECAY * self._mean + (1 - _DECAY) * loss
            self._weight = _DECAY * self._weight + (1 - _DECAY)


class LogLines:
    """Describes what was measured since the last line."""

    def __init__(self, engine: RapidformerEngine) -> None:
        self._engine = engine
        self._rate: float | None = None
        self._has_measured = False

    def measure_device(self) -> None:
        """Measure the device's rate on rank 0, before the first step: tenths of a second."""
        engine = self._engine
        if engine.is_main and engine.model.work is not None:
            self._rate = measure_rank_rate(engine.device, engine.runtime.precision.dtype)

    def describe(
        self, measured: Measurement, place: dict[str, Any], *, lr: float, updates_left: int | None
    ) -> dict[str, Any]:
        """The figures by name, as they go to ``metrics.jsonl``; ``place`` is the step and epoch."""
        engine, updates = self._engine, len(measured.losses)
        step_time = measured.seconds / updates
        line: dict[str, Any] = {
            **measured.parts,
            **place,
            "loss": measured.loss,
            "lr": lr,
            "grad_norm": measured.norms[-1],
            "step_time": step_time,
            "samples_per_second": measured.samples / measured.seconds,
        }
        if measured.slots:  # not known for images, for example
            line["tokens_per_second"] = measured.tokens / measured.seconds
            line["padding_share"] = 1 - measured.tokens / measured.slots
        # The first step alone prepares much that later ones reuse: it predicts nothing.
        if updates_left is not None and (self._has_measured or updates > 1):
            line["seconds_left"] = max(updates_left, 0) * step_time
        self._has_measured = True
        # A model's arithmetic grows with its tokens, so these must be known.
        if self._rate is not None and measured.slots:
            assert engine.model.work is not None
            operations = engine.model.work.count(
                tokens=measured.tokens,
                targets=measured.labels,
                rows=measured.samples,
                is_packed=bool(engine.args.packing),
            )
            devices = engine.args.world_size
            line["mfu"] = operations / (measured.seconds * self._rate * devices)
        if engine.device.type == "cuda":
            line["memory_gib"] = torch.cuda.max_memory_allocated(engine.device) / 2**30
        if engine.updates.graphs is not None:
            line["cuda_graphs"] = engine.updates.graphs.count
        if engine.updates.scaler is not None:
            line["loss_scale"] = engine.updates.scaler.scale
            line["skipped_updates"] = engine.updates.clock.skipped
        return line
