"""The figures of a log line: the loss, the speed, the memory and the time that is left."""

from __future__ import annotations

from typing import Any

import torch

from rapidformer.dist.matrix_rate import measure_rank_rate
from rapidformer.engine import RapidformerEngine
from rapidformer.training.meter import Measurement


class LogLines:
    """Describes what was measured since the last line."""

    def __init__(self, engine: RapidformerEngine) -> None:
        self._engine = engine
        self._utilization = Utilization(engine)
        self._has_measured = False

    def measure_device(self) -> None:
        """Measure the device's rate, before the first step."""
        self._utilization.measure_device()

    def describe(
        self, measured: Measurement, place: dict[str, Any], *, lr: float, updates_left: int
    ) -> dict[str, Any]:
        """The figures by name, as they go to ``metrics.jsonl``; ``place`` is the step and epoch."""
        engine, updates = self._engine, len(measured.losses)
        step_time = measured.seconds / updates
        line: dict[str, Any] = {
            **measured.parts,
            **place,
            "loss": measured.loss,
            "lr": lr,
            "grad_norm": measured.grad_norm,
            "step_time": step_time,
            "samples_per_second": measured.samples / measured.seconds,
        }
        if measured.slots:  # not known for images, for example
            line["tokens_per_second"] = measured.tokens / measured.seconds
            line["padding_share"] = 1 - measured.tokens / measured.slots
        # The first step alone prepares much that later ones reuse: it predicts nothing.
        if self._has_measured or updates > 1:
            line["seconds_left"] = max(updates_left, 0) * step_time
        self._has_measured = True
        if (utilization := self._utilization.compute(measured)) is not None:
            line["mfu"] = utilization
        if engine.device.type == "cuda":
            line["memory_gib"] = torch.cuda.max_memory_allocated(engine.device) / 2**30
        if engine.updates.graphs is not None:
            line["cuda_graphs"] = engine.updates.graphs.count
        if engine.updates.scaler is not None:
            line["loss_scale"] = engine.updates.scaler.scale
            line["skipped_updates"] = engine.updates.clock.skipped
        return line


class Utilization:
    """Computes the utilization of each log interval, on rank 0."""

    def __init__(self, engine: RapidformerEngine) -> None:
        self._engine = engine
        self._rate: float | None = None

    def measure_device(self) -> None:
        """Measure before the first step: at most tenths of a second."""
        engine = self._engine
        if engine.is_main and engine.model.work is not None:
            self._rate = measure_rank_rate(
                engine.device, engine.runtime.precision.dtype, engine.args.world_size
            )

    def compute(self, measured: Measurement) -> float | None:
        """The utilization of all devices; None on other ranks, and if nothing was measured.

        A model's arithmetic grows with its tokens, so these must be known.
        """
        if self._rate is None or not measured.slots:
            return None
        assert self._engine.model.work is not None
        operations = self._engine.model.work.count(
            tokens=measured.tokens,
            targets=measured.labels,
            rows=measured.samples,
            is_packed=bool(self._engine.args.packing),
        )
        devices = self._engine.args.world_size
        return operations / (measured.seconds * self._rate * devices)
