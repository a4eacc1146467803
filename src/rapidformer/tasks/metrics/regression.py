"""Correlations and errors of predicted numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def compute_regression(predictions: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """Pearson and Spearman correlation, mean squared and mean absolute error.

    The correlation with a constant is undefined; it is reported as 0, so that an untrained model
    does not put NaN into the results.
    """
    import torch
    from torchmetrics.functional import regression

    predicted = torch.as_tensor(predictions, dtype=torch.float64)
    wanted = torch.as_tensor(labels, dtype=torch.float64)
    is_defined = len(wanted) > 1 and predicted.std() > 0 and wanted.std() > 0
    pearson = float(regression.pearson_corrcoef(predicted, wanted)) if is_defined else 0.0
    spearman = float(regression.spearman_corrcoef(predicted, wanted)) if is_defined else 0.0
    return {
        "pearson": 0.0 if math.isnan(pearson) else pearson,
        "spearmanr": 0.0 if math.isnan(spearman) else spearman,
        "mse": float((predicted - wanted).square().mean()),
        "mae": float((predicted - wanted).abs().mean()),
    }
