"""Learn a teacher's distribution over the next token, and the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rapidformer.objectives.divergence import DivergenceSums, sum_divergences
from rapidformer.objectives.logprobs import get_logits
from rapidformer.objectives.objective import Context, Objective, Term, Terms
from rapidformer.objectives.reference import ask

Inputs = Mapping[str, Any]


def _take(model: Any, inputs: Inputs) -> Inputs:
    return inputs


@dataclass(frozen=True, kw_only=True)
class Distillation(Objective):
    """alpha x temperature^2 x divergence + (1 - alpha) x label loss, per labelled token."""

    frozen = ("teacher",)

    beta: float = 0.0
    """0: KL(teacher, student); 1: KL(student, teacher); between: the Jensen-Shannon divergence."""
    temperature: float = 1.0
    alpha: float = 1.0
    get_inputs: Callable[[Any, Inputs], Inputs] = _take
    """What a model is called with, from a batch without labels."""

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        student = get_logits(model, self.get_inputs(model, inputs), labels)
        # Second: in a pipeline, only the stage that has the student's logits asks the teacher.
        teacher = ask(
            context, "teacher", lambda m: get_logits(m, self.get_inputs(m, inputs), labels)
        )
        sums = self.sum(student, teacher, labels)
        count = (labels[:, 1:] != -100).sum().clamp(min=1)
        return {
            "loss": Term(sums.loss / count),
            "divergence_loss": Term(sums.divergence / count, weight=0.0),
            "label_loss": Term(sums.label_loss / count, weight=0.0),
        }

    def sum(self, student: Tensor, teacher: Tensor, labels: Tensor) -> DivergenceSums:
        """The sums over the labelled tokens, from the logits of both."""
        return sum_divergences(
            student, teacher, labels, beta=self.beta, temperature=self.temperature,
            label_weight=1 - self.alpha, divergence_weight=self.alpha * self.temperature**2,
        )  # fmt: skip
