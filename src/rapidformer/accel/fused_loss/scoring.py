"""Rows of logits and their labels: losses, gradients and statistics, of the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.dist.vocabulary import Scored


def score(
    logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float,
    *, has_gradient: bool = True, has_statistics: bool = False,
) -> Scored:  # fmt: skip
    """The rows' cross entropies, and the gradient of their sum in the logits' dtype."""
    is_ignored = (labels == ignore_index)[:, None]
    index = labels[:, None].masked_fill(is_ignored, 0)
    log_probabilities = functional.log_softmax(logits.float(), -1)
    chosen = log_probabilities.gather(1, index)
    losses = chosen * (smoothing - 1)
    if smoothing:
        losses -= smoothing * log_probabilities.mean(-1, keepdim=True)
    is_best = chosen >= log_probabilities.amax(-1, keepdim=True) if has_statistics else None
    losses = losses.masked_fill_(is_ignored, 0.0).squeeze(1)
    if not (has_gradient or has_statistics):
        return Scored(losses)
    # In place from here on: this is the largest tensor.
    gradient = log_probabilities.exp_()
    statistics = None
    if is_best is not None:
        entropies = torch.special.entr(gradient).sum(-1)
        means = logits.mean(-1, dtype=torch.float32)
        statistics = torch.stack([entropies, means, is_best.squeeze(1).float()])
        statistics.masked_fill_(is_ignored.T, 0.0)
    if not has_gradient:
        return Scored(losses, None, statistics)
    if smoothing:
        gradient -= smoothing / gradient.shape[-1]
    gradient.scatter_add_(1, index, torch.full_like(chosen, smoothing - 1))
    gradient.masked_fill_(is_ignored, 0.0)
    return Scored(losses, gradient.to(logits.dtype), statistics)
