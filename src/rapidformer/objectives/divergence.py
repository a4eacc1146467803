"""How far a student is from its teacher on labelled tokens, in fp32, from both heads in chunks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rapidformer.accel.fused_loss.chunked import Recipe
from rapidformer.accel.fused_loss.divergence import Divergence
from rapidformer.accel.fused_loss.followed import compute_logit_losses
from rapidformer.objectives.logprobs import find_labelled_rows, flatten_rows


class DivergenceSums(NamedTuple):
    """Sums over the labelled tokens of a micro-batch."""

    loss: Tensor
    """The weighted sum of the other two, and the only one with a gradient."""
    divergence: Tensor
    label_loss: Tensor
    """The cross entropy with the labels; 0 if its weight is."""


def sum_divergences(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    divergence_weight: float = 1.0,
    label_weight: float = 0.0,
    is_shifted: bool = True,
) -> DivergenceSums:
    """The divergence of two models' logits, as ``get_logits`` returns them.

    ``beta`` 0 is KL(teacher || student), 1 is KL(student || teacher); in between, the generalised
    Jensen-Shannon divergence, with that weight for the teacher. Both logits are divided by the
    temperature, except for the label loss. If one vocabulary is longer, the ids that both have are
    compared. There is no factor of the temperature squared: it can be part of the weight.
    """
    rows, targets = flatten_rows(student, labels, is_shifted=is_shifted)
    others, _ = flatten_rows(teacher, labels, is_shifted=is_shifted)
    divergence = Divergence(beta, temperature, divergence_weight, label_weight)
    labelled = find_labelled_rows(labels, is_shifted=is_shifted)
    recipe = Recipe(divergence=divergence, labelled=labelled)
    sums = compute_logit_losses(rows, targets, recipe, others)
    assert sums.statistics is not None
    return DivergenceSums(sums.values, *sums.statistics.unbind())
