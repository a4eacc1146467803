"""How far a student's predictions are from a teacher's, for a chunk of rows of both heads.

With P_S and P_T the softmax of their logits over the temperature, and M = b P_T + (1 - b) P_S:

    b = 0        KL(P_T || P_S)
    b = 1        KL(P_S || P_T)
    otherwise    b KL(P_T || M) + (1 - b) KL(P_S || M), the generalised Jensen-Shannon divergence

The gradient of the last one is short: a word that is more likely to the student moves M as well,
and what that adds to both terms cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.dist.vocabulary import Scored, VocabularySlice


@dataclass(frozen=True)
class Teacher:
    """The other head, which does not learn."""

    rows: Tensor
    """Hidden states, a row for each of the student's; the logits themselves if there is no head."""
    weight: Tensor | None = None
    bias: Tensor | None = None
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    """What the model does to each logit."""
    words: VocabularySlice | None = None
    """Set if the head has only this rank's slice of the vocabulary."""

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Teacher:
        """The same teacher for other rows."""
        return replace(self, rows=function(self.rows))

    def compute_logits(self, start: int, stop: int) -> Tensor:
        """The logits of some rows for all words."""
        logits = self.rows[start:stop]
        if self.weight is not None:
            bias = None if self.bias is None else self.bias.to(logits.dtype)
            logits = functional.linear(logits, self.weight.to(logits.dtype), bias)
        logits = logits if self.words is None else self.words.join(logits)
        for step in self.steps:
            logits = step(logits)
        return logits


@dataclass(frozen=True)
class Divergence:
    """Which divergence, and its factor beside that of the label loss."""

    beta: float
    temperature: float = 1.0
    weight: float = 1.0
    label_weight: float = 0.0

    def compare(
        self, student: Tensor, teacher: Tensor, words: VocabularySlice | None, *, has_gradient: bool
    ) -> Scored:
        """The divergence of each row in fp32, and the gradient of the student's logits.

        ``student`` has this rank's words, ``teacher`` all of its own. Words that only one of them
        has do not count.
        """
        length = student.shape[-1] if words is None else words.length
        first = 0 if words is None else words.bounds[0]
        common = min(length, teacher.shape[-1])
        count = min(max(common - first, 0), student.shape[-1])
        log_t = functional.log_softmax(teacher[:, :common].float() / self.temperature, -1)
        log_t = log_t[:, first : first + count]
        log_s = _normalize(student[:, :count].float() / self.temperature, words)

        def add_up(values: Tensor) -> Tensor:
            total = values.sum(-1, keepdim=True)
            return total if words is None else words.sum(total)

        p_s = log_s.exp()
        if self.beta == 0:
            p_t = log_t.exp()
            divergence = add_up(p_t * (log_t - log_s))
            gradient = p_s.sub_(p_t)
        elif self.beta == 1:
            ratio = log_s - log_t
            divergence = add_up(p_s * ratio)
            gradient = p_s.mul_(ratio.sub_(divergence))
        else:
            own = math.log1p(-self.beta)
            log_m = torch.logaddexp(log_t + math.log(self.beta), log_s + own)
            ratio = log_s - log_m
            of_student = add_up(p_s * ratio)
            of_teacher = add_up(log_t.exp() * (log_t - log_m))
            divergence = self.beta * of_teacher + (1 - self.beta) * of_student
            gradient = p_s.mul_(ratio.sub_(of_student)).mul_(1 - self.beta)
        if not has_gradient:
            return Scored(divergence.squeeze(-1))
        gradient.mul_(1 / self.temperature)
        missing = student.shape[-1] - count
        gradient = functional.pad(gradient, (0, missing)) if missing else gradient
        return Scored(divergence.squeeze(-1), gradient)

    def join(self, compared: Scored, labelled: Scored | None, is_kept: Tensor) -> Scored:
        """The loss of each row from its divergence and its label; the statistics are the two."""
        values = compared.losses.masked_fill(~is_kept, 0.0)
        of_labels = torch.zeros_like(values) if labelled is None else labelled.losses
        losses = self.weight * values + self.label_weight * of_labels
        gradient = compared.gradient
        if gradient is not None:
            gradient = gradient.masked_fill_(~is_kept[:, None], 0.0).mul_(self.weight)
            if labelled is not None and labelled.gradient is not None:
                gradient.add_(labelled.gradient, alpha=self.label_weight)
        return Scored(losses, gradient, torch.stack([values, of_labels]))


def _normalize(logits: Tensor, words: VocabularySlice | None) -> Tensor:
    """The log-probabilities of rows of logits, of which each rank has some columns."""
    if words is None:
        return functional.log_softmax(logits, -1)
    relative = logits - words.find_greatest(logits)[:, None]
    return relative - words.sum(relative.exp().sum(-1, keepdim=True)).log()
