"""What is learnt from preferences. Every mean is over the pairs (or answers) of the whole update.

A batch of pairs has interleaved rows: 2i is the better answer of pair i, 2i + 1 the worse one.
KTO's baseline compares prompts with answers that do not belong to them: with those before them in
the update, whichever micro-batch and process they are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rapidformer.data.batch import get_host_copy
from rapidformer.data.update import MicroBatch
from rapidformer.models.configuration import get_position_limit
from rapidformer.objectives import Context, Objective, Term, Terms
from rapidformer.objectives.logprobs import TokenScores, get_token_logprobs, get_token_scores
from rapidformer.objectives.objective import MODEL_INPUTS, Count
from rapidformer.objectives.reference import LOGPS, REFERENCE, get_reference_logprobs
from rapidformer.tasks.base import IGNORED_LABEL
from rapidformer.tasks.preference.losses import (
    LossSettings,
    compute_kto_losses,
    compute_log_odds,
    compute_pair_losses,
    compute_reward_losses,
)
from rapidformer.tasks.rows.rows import to_rows


@dataclass
class PairScores:
    """One value for each pair."""

    losses: Tensor
    shown: dict[str, Tensor] = field(default_factory=dict)
    """What the losses are made of, by TRL's names."""
    by_token: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sums over tokens, and how many tokens these are: what is a mean over tokens."""

    def to_records(self) -> list[dict[str, Any]]:
        """One for each pair, for an evaluation."""
        shown = to_rows({name: values.tolist() for name, values in self.shown.items()})
        columns = {"loss": self.losses.tolist(), "shown": shown, "count": [1] * len(shown)}
        sums = {name: torch.stack(pair, 1).tolist() for name, pair in self.by_token.items()}
        return to_rows({**columns, "by_token": to_rows(sums) or [{}] * len(shown)})


class PairObjective(Objective):
    """To prefer one answer to another."""

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings
        self.frozen = (REFERENCE,) if settings.needs_reference else ()
        is_orpo = settings.name == "orpo"
        self._names = (
            ("odds_ratio_loss", "nll_loss") if is_orpo else ("preference_loss", "sft_loss")
        )
        self._weights = (settings.beta, 1.0) if is_orpo else (1.0, settings.sft_weight)

    @property
    def has_likelihood(self) -> bool:
        return self._weights[1] > 0

    def score(self, model: Any, batch: Any, context: Context) -> PairScores:
        """The loss of each pair, and what TRL reports of it."""
        settings, labels = self.settings, batch["labels"]
        read = self._get_read_labels(batch)
        reference: Tensor | None = None
        if settings.needs_reference:  # first: what the model keeps for its backward pass is large
            reference = get_reference_logprobs(context, get_inputs(batch, LOGPS), labels)
        scores = get_token_scores(model, get_inputs(batch), read)
        is_answer = labels != IGNORED_LABEL
        logps = scores.logprobs.where(is_answer, 0.0).sum(1)
        lengths = is_answer.sum(1).clamp(min=1)
        ratios = logps if reference is None else logps - reference
        means = ratios / lengths if settings.is_normalized else ratios
        losses = compute_pair_losses(*split_pairs(means), settings)
        # TRL shows sums where there is a reference, and means over tokens where there is none.
        rewards = settings.beta * (ratios if settings.needs_reference else means)
        chosen, rejected = split_pairs(rewards)
        likely = logps if settings.needs_reference else means
        shown = {
            "rewards/chosen": chosen, "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(), "rewards/margins": chosen - rejected,
            **dict(zip(("logps/chosen", "logps/rejected"), split_pairs(likely), strict=True)),
        }  # fmt: skip
        if settings.name == "orpo":
            shown |= {
                "log_odds_ratio": -losses,
                "log_odds_chosen": compute_log_odds(*split_pairs(means)),
            }
        sums = sum_tokens(scores, is_answer)
        by_token = {
            "logits/chosen": (sums.logits[::2], sums.tokens[::2]),
            "logits/rejected": (sums.logits[1::2], sums.tokens[1::2]),
            "entropy": (sums.entropies.view(-1, 2).sum(1), sums.tokens.view(-1, 2).sum(1)),
            "mean_token_accuracy": (sums.hits[::2], sums.tokens[::2]),
        }
        if self.has_likelihood:
            counts = (read[:, 1:] != IGNORED_LABEL).sum(1)
            by_token[self._names[1]] = -scores.logprobs.sum(1)[::2], counts[::2]
        return PairScores(losses, shown, by_token)

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        scores = self.score(model, batch, context)
        (name, other), (weight, other_weight) = self._names, self._weights
        terms = _show(scores.shown)
        for token_name, (sums, counts) in scores.by_token.items():
            share = other_weight if token_name == other else 0.0
            terms[token_name] = Term.from_sum(sums.sum(), counts.sum(), share)
        if not self.has_likelihood:
            return {**terms, "loss": Term.from_rows(scores.losses)}
        return {**terms, name: Term.from_sum(scores.losses.sum(), len(scores.losses), weight)}

    def count(self, micro_batch: MicroBatch) -> Mapping[str, Count]:
        if not self.has_likelihood:
            return {}
        read = self._get_read_labels(micro_batch.batch)[::2, 1:]
        name, other = self._names
        return {name: len(read), other: (read != IGNORED_LABEL).sum()}

    def combine(self, loss: float, means: Mapping[str, float]) -> float:
        """The whole loss, from the means over all pairs and over all tokens."""
        if not self.has_likelihood:
            return loss
        return self._weights[0] * loss + self._weights[1] * means[self._names[1]]

    def _get_read_labels(self, batch: Any) -> Tensor:
        """The tokens whose log-probabilities are needed: ORPO learns better rows as a whole."""
        labels: Tensor = batch["labels"]
        if self.settings.name != "orpo":
            return labels
        whole = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
        is_better = torch.arange(len(labels), device=labels.device) % 2 == 0
        return torch.where(is_better[:, None], whole, labels)


class RewardObjective(Objective):
    """To score one answer higher than another."""

    def __init__(self, centering: float = 0.0) -> None:
        self.centering = centering

    def score(self, model: Any, batch: Any) -> tuple[PairScores, Tensor]:
        """The loss of each pair, and the reward of each answer."""
        rewards = model(**get_inputs(batch)).logits.float().squeeze(-1)
        chosen, rejected = split_pairs(rewards)
        losses = compute_reward_losses(chosen, rejected, batch.get("margin"), self.centering)
        shown = {
            "accuracy": (chosen > rejected).float(), "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }  # fmt: skip
        return PairScores(losses, shown), rewards

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        scores, _ = self.score(model, batch)
        return {**_show(scores.shown), "loss": Term.from_rows(scores.losses)}


class KTOObjective(Objective):
    """To give good answers more probability, and bad ones less, than a baseline gets."""

    frozen = (REFERENCE,)
    has_first_pass = True

    def __init__(self, settings: LossSettings, max_length: int | None = None) -> None:
        self.settings, self._max_length = settings, max_length

    def exchange(self, batch: Any) -> Mapping[str, Tensor]:
        """The answers of these rows, for the prompts of others."""
        ids, labels, starts, lengths = _read_rows(batch)
        sizes = lengths - starts
        places = torch.arange(int(sizes.max()))
        index = (starts[:, None] + places).clamp(max=ids.shape[1] - 1)
        is_real = places < sizes[:, None]
        device = batch["input_ids"].device
        return {
            "ids": ids.gather(1, index).where(is_real, IGNORED_LABEL).to(device),
            "labels": labels.gather(1, index).where(is_real, IGNORED_LABEL).to(device),
        }

    def first_pass(self, model: Any, batch: Any, context: Context) -> Mapping[str, Tensor]:
        """How much more likely than in the reference an answer to another prompt is."""
        inputs, labels = self._mismatch(model, batch, context)
        ratios = _compare(model, inputs, labels, context)
        return {"ratio": ratios, "desirable": batch["desirable"]}

    def summarize(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The baseline z is 0 at least, and 0 for a single answer, which has no other prompt."""
        ratios, good = rows["ratio"], rows["desirable"].sum()
        baseline = ratios.mean().clamp(min=0) if len(ratios) > 1 else ratios.new_zeros(())
        return {"kl": baseline, "desirable": good, "undesirable": len(ratios) - good}

    def score(self, model: Any, batch: Any, context: Context) -> tuple[Tensor, Tensor, TokenSums]:
        """Of each answer: how much more likely than in the reference it is, how likely, and what
        is shown of its tokens."""
        inputs, labels = get_inputs(batch), batch["labels"]
        # The reference first: nothing of the backward pass is held while it answers.
        reference = get_reference_logprobs(context, inputs, labels)
        scores = get_token_scores(model, inputs, labels)
        logps = scores.logprobs.sum(1)
        return logps - reference, logps, sum_tokens(scores, labels != IGNORED_LABEL)

    def score_others(self, model: Any, batch: Any, context: Context) -> Tensor:
        """The ratios of answers to other prompts that the batch brings, in an evaluation."""
        inputs = {name: batch[f"other_{name}"] for name in ("input_ids", "attention_mask")}
        return _compare(model, inputs, batch["other_labels"], context)

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        ratios, logps, sums = self.score(model, batch, context)
        is_good = batch["desirable"].bool()
        update, rows = context.rows, len(ratios)
        losses = compute_kto_losses(ratios, is_good, update["kl"], self.settings)
        rewards, logps = self.settings.beta * ratios.detach(), logps.detach()
        terms = {"kl": Term(update["kl"], rows, 0.0)}
        for name, of in (("chosen", is_good), ("rejected", ~is_good)):
            for kind, values in (("rewards", rewards), ("logps", logps)):
                total = values.where(of, 0.0).sum()
                terms[f"{kind}/{name}"] = Term.from_sum(total, of.sum(), 0.0)
            total, tokens = (v.where(of, 0).sum() for v in (sums.logits, sums.tokens))
            terms[f"logits/{name}"] = Term.from_sum(total, tokens, 0.0)
        terms["entropy"] = Term.from_sum(sums.entropies.sum(), sums.tokens.sum(), 0.0)
        terms["rewards/margins"] = _get_margin(rewards, is_good, update)
        return {**terms, "loss": Term.from_rows(losses)}

    def sum_losses(self, ratios: Sequence[float], is_good: bool, baseline: float) -> float:
        """The losses of good or of bad answers."""
        values = torch.tensor(ratios, dtype=torch.float64)
        losses = compute_kto_losses(
            values, torch.tensor(is_good), values.new_tensor(baseline), self.settings
        )
        return float(losses.sum())

    def _mismatch(
        self, model: Any, batch: Any, context: Context
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Each prompt with the answer of the row before it in the update."""
        assert context.places is not None
        ids, _, starts, _ = _read_rows(batch)
        device = batch["input_ids"].device
        answers, labels = context.rows["ids"], context.rows["labels"]
        others = (context.places - 1) % len(answers)
        width = int(starts.max()) + answers.shape[1]
        limits = (self._max_length, get_position_limit(model.config))
        width = min(width, *(limit for limit in limits if limit is not None))
        places = torch.arange(width, device=device)
        begins = starts.to(device)[:, None]
        index = (places - begins).clamp(0, answers.shape[1] - 1)
        is_prompt = places < begins
        is_in = places - begins < answers.shape[1]
        prompts = functional.pad(ids.to(device), (0, max(0, width - ids.shape[1])))[:, :width]
        tail = answers[others].gather(1, index).where(is_in, IGNORED_LABEL)
        mixed = torch.where(is_prompt, prompts, tail)
        kept = labels[others].gather(1, index).where(is_in & ~is_prompt, IGNORED_LABEL)
        mask = mixed != IGNORED_LABEL
        inputs = {"input_ids": mixed.where(mask, 0), "attention_mask": mask.long()}
        return inputs, kept


class TokenSums(NamedTuple):
    """What a model says of the tokens of each answer, summed."""

    entropies: Tensor
    logits: Tensor
    """Means over the vocabulary."""
    hits: Tensor
    """Tokens that are likelier than all others."""
    tokens: Tensor
    """How many there are."""


def sum_tokens(scores: TokenScores, is_answer: Tensor) -> TokenSums:
    """The sums over the answers' tokens."""
    shown = (scores.entropies, scores.mean_logits, scores.is_best)
    entropies, logits, hits = (values.where(is_answer, 0.0).sum(1) for values in shown)
    return TokenSums(entropies, logits, hits, is_answer.sum(1))


def _get_margin(rewards: Tensor, is_good: Tensor, update: Mapping[str, Tensor]) -> Term:
    """The mean reward of good answers less that of bad ones, as a mean over all answers."""
    good, bad = update["desirable"], update["undesirable"]
    total = good + bad
    shares = torch.where(is_good, total / good.clamp(min=1), -total / bad.clamp(min=1))
    return Term.from_sum((rewards * shares).sum(), len(rewards) * (good > 0) * (bad > 0), 0.0)


def _show(values: Mapping[str, Tensor]) -> dict[str, Term]:
    """Means over pairs that are not learnt from."""
    return {name: Term.from_sum(v.detach().sum(), len(v), 0.0) for name, v in values.items()}


def split_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values of better and of worse answers."""
    return rows[::2], rows[1::2]


def get_inputs(batch: Mapping[str, Tensor], *others: str) -> dict[str, Tensor]:
    """What the model is called with, and some of the batch's other tensors."""
    return {name: batch[name] for name in (*MODEL_INPUTS, *others) if name in batch}


def _compare(model: Any, inputs: Mapping[str, Tensor], labels: Tensor, context: Context) -> Tensor:
    """Log-probabilities of answers relative to the reference."""
    reference = get_reference_logprobs(context, inputs, labels)
    return get_token_logprobs(model, inputs, labels).sum(1) - reference


def _read_rows(batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and labels on the host, where each row's answer begins and where the row ends."""
    ids, labels, mask = (get_host_copy(batch[n]) for n in ("input_ids", "labels", "attention_mask"))
    return ids, labels, (labels != IGNORED_LABEL).int().argmax(1), mask.sum(1)
