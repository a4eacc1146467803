"""Model FLOP utilization: the model's arithmetic as a fraction of what the device can do.

Both sides are exact or measured: ``models.work`` counts the arithmetic, and the device's rate is
that of a large matrix product in the run's precision.
"""

from __future__ import annotations

from rapidformer.dist.matrix_rate import measure_rank_rate
from rapidformer.engine import RapidformerEngine
from rapidformer.training.meter import Measurement


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
