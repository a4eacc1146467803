"""How far a student's distribution over the next token is from a teacher's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class DivergenceSums(NamedTuple):
    """Sums over the labelled tokens of a micro-batch, in fp32."""

    loss: Tensor
    """The weighted sum of both; the only one with a gradient."""
    divergence: Tensor
    label_loss: Tensor
    """0 if it has no weight."""


def sum_divergences(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    label_weight: float = 0.0,
    divergence_weight: float = 1.0,
    is_shifted: bool = True,
) -> DivergenceSums:
    """The generalised Jensen-Shannon divergence of two models' logits, and the label loss.

    ``beta`` 0 is KL(teacher, student), 1 is KL(student, teacher). Only ids that both models have
    are compared.
    """
    if is_shifted:
        student, teacher, labels = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    is_answer = labels != -100
    student, teacher, labels = (
        student[is_answer].float(),
        teacher[is_answer].float(),
        labels[is_answer],
    )
    common = min(student.shape[-1], teacher.shape[-1])
    ours = functional.log_softmax(student[:, :common] / temperature, dim=-1)
    theirs = functional.log_softmax(teacher[:, :common] / temperature, dim=-1)
    if beta == 0:
        divergence = _kl(theirs, ours)
    elif beta == 1:
        divergence = _kl(ours, theirs)
    else:
        weights = torch.tensor([1 - beta, beta], device=ours.device).log()
        mixture = torch.logaddexp(ours + weights[0], theirs + weights[1])
        divergence = beta * _kl(theirs, mixture) + (1 - beta) * _kl(ours, mixture)
    label_loss = torch.zeros((), device=ours.device)
    if label_weight:
        label_loss = functional.cross_entropy(student, labels, reduction="sum")
    loss = divergence_weight * divergence + label_weight * label_loss
    return DivergenceSums(loss, divergence.detach(), label_loss.detach())


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return functional.kl_div(to, of, reduction="sum", log_target=True)
