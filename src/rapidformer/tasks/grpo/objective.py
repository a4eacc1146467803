"""GRPO: of several answers to a prompt, those with a higher reward than the others become likelier.

Each kind of loss is normalised over the whole update, however it is split:

- ``dapo`` and ``bnpo``: the mean over all answer tokens (elsewhere, bnpo takes the mean of each
  local batch and depends on its size; here an update is one batch);
- ``grpo``: the mean over answers of the mean over their tokens;
- ``dr_grpo``: the sum over all tokens, divided by the answers times the longest possible answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapidformer.data.update import Update
from rapidformer.dist.topology import Topology
from rapidformer.objectives import Context, Objective, Term, Terms
from rapidformer.objectives.logprobs import get_token_logprobs, get_token_scores
from rapidformer.objectives.reference import REFERENCE, ask
from rapidformer.tasks.base import IGNORED_LABEL, Batch
from rapidformer.tasks.grpo.rollouts import STATISTICS, Rollouts


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """The loss of an answer's tokens."""

    kind: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    """The weight of the divergence from the reference; 0 needs none."""
    corrects_kl: bool = True
    """Whether the divergence is weighed by the ratio of probabilities, as the answers are drawn by
    an older model: its gradient is then unbiased."""
    max_tokens: int = 1
    """The longest possible answer, for dr_grpo."""

    def compute(
        self, logps: Tensor, old: Tensor, reference: Tensor | None, worth: Tensor, counted: Tensor
    ) -> dict[str, Term]:
        """Terms of a micro-batch from [rows, tokens]; ``worth`` has a row's advantage."""
        above = self.epsilon if self.epsilon_high is None else self.epsilon_high
        low, high = 1 - self.epsilon, 1 + above
        worth, mask = worth[:, None], counted.to(logps.dtype)
        tokens, rows = mask.sum(), len(logps)
        ratio = (logps - old).exp()
        losses = -torch.min(ratio * worth, ratio.clamp(low, high) * worth)
        terms: dict[str, Term] = {}
        if reference is not None:
            change = reference - logps
            divergence = (change.exp() - change - 1) * (ratio if self.corrects_kl else 1)
            losses = losses + self.beta * divergence
            terms["kl"] = Term.from_sum((divergence * mask).sum(), tokens, weight=0.0)
        is_low, is_high = (ratio < low) & (worth < 0), (ratio > high) & (worth > 0)
        for name, is_clipped in (("low", is_low), ("high", is_high), ("region", is_low | is_high)):
            clipped = (is_clipped * mask).sum()
            terms[f"clip_ratio/{name}_mean"] = Term.from_sum(clipped, tokens, weight=0.0)
        by_row = (losses * mask).sum(1)
        if self.kind == "grpo":
            loss = Term.from_sum((by_row / mask.sum(1).clamp(min=1)).sum(), rows)
        elif self.kind == "dr_grpo":
            loss = Term.from_sum(by_row.sum() / self.max_tokens, rows)
        else:
            loss = Term.from_sum(by_row.sum(), tokens)
        return {**terms, "loss": loss}


class GrpoObjective(Objective):
    """Learns from answers that the model itself has given."""

    expands = True

    def __init__(self, loss: GrpoLoss, rollouts: Rollouts, temperature: float = 1.0) -> None:
        self._loss, self._rollouts, self._temperature = loss, rollouts, temperature
        self.frozen = (REFERENCE,) if loss.beta else ()

    def expand(
        self, model: Any, update: Update, topology: Topology, device: torch.device
    ) -> Update:
        return self._rollouts.expand(model, update, topology, device, self._get_logps)

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        labels, counted = batch["labels"], batch["labels"] != IGNORED_LABEL
        reference: Tensor | None = None
        if self._loss.beta:  # first: what the model keeps for its backward pass is large
            reference = ask(context, REFERENCE, lambda frozen: self._get_logps(frozen, batch))
        scores = get_token_scores(model, _get_inputs(batch), labels, temperature=self._temperature)
        logps = scores.logprobs
        old = batch.get("old_logps", logps.detach())
        terms = self._loss.compute(logps, old, reference, batch["advantages"], counted)
        terms["entropy"] = Term.from_sum(scores.entropies.sum(), counted.sum(), weight=0.0)
        shown = zip(self._rollouts.statistics, batch[STATISTICS].unbind(), strict=True)
        return {**{name: Term(value, len(logps), 0.0) for name, value in shown}, **terms}

    def _get_logps(self, model: Any, batch: Batch) -> Tensor:
        return get_token_logprobs(
            model, _get_inputs(batch), batch["labels"], temperature=self._temperature
        )

    def state_dict(self) -> dict[str, Any]:
        return self._rollouts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rollouts.load_state_dict(state)


def _get_inputs(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}
