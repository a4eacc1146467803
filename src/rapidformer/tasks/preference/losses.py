"""The losses of preferences, as functions of log-probabilities and scores; one value for each pair.

``LossSettings`` says which one and how. All arithmetic is in the inputs' precision: fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.config import Settings

_BETA, _SIMPO_BETA = 0.1, 2.0
_NORMALIZED = ("ipo", "simpo", "orpo")
_WITHOUT_REFERENCE = ("simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What --loss and the settings around it say."""

    name: str = "sigmoid"
    beta: float = _BETA
    gamma: float = 1.0
    label_smoothing: float = 0.0
    is_normalized: bool = False
    """Whether log-probabilities are means over the tokens of an answer."""
    sft_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @classmethod
    def read(cls, args: Settings) -> LossSettings:
        name = args.loss or "sigmoid"
        usual = _SIMPO_BETA if name == "simpo" else _BETA
        is_normalized = args.length_normalized
        return cls(
            name=name, beta=usual if args.beta is None else args.beta, gamma=args.simpo_gamma,
            label_smoothing=args.label_smoothing, sft_weight=args.sft_weight,
            is_normalized=name in _NORMALIZED if is_normalized is None else is_normalized,
            desirable_weight=args.desirable_weight, undesirable_weight=args.undesirable_weight,
        )  # fmt: skip

    @property
    def needs_reference(self) -> bool:
        return self.name not in _WITHOUT_REFERENCE


def compute_pair_losses(chosen: Tensor, rejected: Tensor, settings: LossSettings) -> Tensor:
    """From log-probabilities of both answers: relative to the reference, if the loss has one."""
    beta, smoothing = settings.beta, settings.label_smoothing
    difference = chosen - rejected
    if settings.name == "hinge":
        return torch.relu(1 - beta * difference)
    if settings.name == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if settings.name == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    if settings.name == "orpo":
        return -functional.logsigmoid(compute_log_odds(chosen, rejected))
    margin = beta * difference - (settings.gamma if settings.name == "simpo" else 0.0)
    right, wrong = -functional.logsigmoid(margin), -functional.logsigmoid(-margin)
    if settings.name == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def compute_log_odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO: the logarithm of the odds of one answer over those of the other, by mean log-probs."""
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(value: Tensor) -> Tensor:
    """log(1 - exp(value)) for values below 0, without cancellation near 0 or far below it."""
    # A probability of exactly 1 would have infinite odds.
    value = value.clamp(max=-torch.finfo(value.dtype).tiny)
    is_near = value > -0.693
    # Each branch gets harmless values where the other one is taken: no NaN in its gradient.
    near = torch.log(-torch.expm1(torch.where(is_near, value, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, value)))
    return torch.where(is_near, near, far)


def compute_kto_losses(
    ratios: Tensor, is_desirable: Tensor, baseline: Tensor, settings: LossSettings
) -> Tensor:
    """From log-probabilities relative to the reference; the baseline is the whole batch's z."""
    above = settings.beta * (ratios - baseline)
    good = settings.desirable_weight * (1 - torch.sigmoid(above))
    bad = settings.undesirable_weight * (1 - torch.sigmoid(-above))
    return torch.where(is_desirable, good, bad)


def compute_reward_losses(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0
) -> Tensor:
    """Bradley and Terry's, with a margin, and a penalty on rewards that drift away from 0."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -functional.logsigmoid(difference)
    return losses + centering * (chosen + rejected) ** 2 if centering else losses
