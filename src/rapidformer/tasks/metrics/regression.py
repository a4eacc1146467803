"""Correlations and errors of predicted numbers."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rapidformer.tasks.metrics.tally import Record, Tally

if TYPE_CHECKING:
    import torch


class RegressionTally(Tally):
    """Pearson and Spearman correlation, mean squared and mean absolute error.

    Ranks depend on all values at once: for Spearman alone, two numbers (16 bytes) are kept per row.
    The correlation with a constant is undefined; it is reported as 0, so that an untrained model
    does not put NaN into the results.
    """

    def __init__(self) -> None:
        import torch
        from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, PearsonCorrCoef

        super().__init__()
        self._metrics = {
            "pearson": PearsonCorrCoef().set_dtype(torch.float64),
            "mse": MeanSquaredError().set_dtype(torch.float64),
            "mae": MeanAbsoluteError().set_dtype(torch.float64),
        }
        self._predicted, self._wanted = array("d"), array("d")

    def add(self, records: Sequence[Record]) -> None:
        predicted = [float(record["logits"][0]) for record in records]
        self.add_numbers(predicted, [float(record["label"]) for record in records])
        self.examples += len(records)

    def add_numbers(self, predicted: Sequence[float], wanted: Sequence[float]) -> None:
        """Add predicted and true numbers."""
        import torch

        for metric in self._metrics.values():
            metric.update(
                torch.as_tensor(predicted, dtype=torch.float64),
                torch.as_tensor(wanted, dtype=torch.float64),
            )
        self._predicted.extend(predicted)
        self._wanted.extend(wanted)

    def score(self) -> dict[str, float]:
        import torch

        predicted = torch.as_tensor(self._predicted, dtype=torch.float64)
        wanted = torch.as_tensor(self._wanted, dtype=torch.float64)
        varies = bool(predicted.ne(predicted[0]).any() and wanted.ne(wanted[0]).any())
        with warnings.catch_warnings():
            # torchmetrics warns about numbers that vary little, which the result shows anyway.
            warnings.simplefilter("ignore")
            pearson = float(self._metrics["pearson"].compute()) if varies else 0.0
        return {
            "pearson": 0.0 if math.isnan(pearson) else pearson,
            "spearmanr": _correlate_ranks(predicted, wanted) if varies else 0.0,
            "mse": float(self._metrics["mse"].compute()),
            "mae": float(self._metrics["mae"].compute()),
        }


def compute_regression(predictions: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """The correlations and errors of all rows at once."""
    tally = RegressionTally()
    tally.add_numbers([float(value) for value in predictions], [float(value) for value in labels])
    return tally.score()


def _correlate_ranks(predicted: torch.Tensor, wanted: torch.Tensor) -> float:
    """Spearman's correlation in fp64; torchmetrics computes the ranks in fp32."""
    import torch

    ranks = torch.stack([_rank(predicted), _rank(wanted)])
    return float(torch.corrcoef(ranks)[0, 1])


def _rank(values: torch.Tensor) -> torch.Tensor:
    """The rank of each value; equal values share the mean of their ranks."""
    import torch

    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: torch.Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[place]
