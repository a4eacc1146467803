"""Metrics of preferences by TRL's names, each pair or answer once, as exact means over a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rapidformer.tasks.metrics.tally import Record, Tally

_KTO_SPLIT = (("chosen", True), ("rejected", False))


class PairTally(Tally):
    """Means over pairs; the likelihood of better answers is a mean over their tokens."""

    def __init__(
        self, combine: Callable[[float, float], float], likelihood_name: str | None = None
    ) -> None:
        super().__init__()
        self._combine, self._likelihood_name = combine, likelihood_name
        self._sums: Counter[str] = Counter()
        self._likelihood, self._tokens = 0.0, 0

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in record["shown"].items():
                self._sums[name] += value
            self._likelihood += record.get("likelihood", 0.0)
            self._tokens += record.get("tokens", 0)
        self.examples += len(records)

    def get_mean_loss(self) -> float:
        loss = super().get_mean_loss()
        return self._combine(loss, self._get_likelihood()) if self._likelihood_name else loss

    def score(self) -> dict[str, float]:
        means = {name: total / max(self.examples, 1) for name, total in self._sums.items()}
        if self._likelihood_name:
            means[self._likelihood_name] = self._get_likelihood()
        return means

    def _get_likelihood(self) -> float:
        return self._likelihood / self._tokens if self._tokens else 0.0


class RewardTally(Tally):
    """Accuracy and margin of pairs, and the range of all rewards."""

    _hits, _margin, _total = 0, 0.0, 0.0
    _least, _most = float("inf"), float("-inf")

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            chosen, rejected = record["rewards"]
            self._hits += chosen > rejected
            self._margin += chosen - rejected
            self._total += chosen + rejected
            self._least = min(self._least, chosen, rejected)
            self._most = max(self._most, chosen, rejected)
        self.examples += len(records)

    def score(self) -> dict[str, float]:
        pairs = max(self.examples, 1)
        return {
            "accuracy": self._hits / pairs, "margin": self._margin / pairs,
            "min_reward": self._least, "mean_reward": self._total / (2 * pairs),
            "max_reward": self._most,
        }  # fmt: skip


class AnswerTally(Tally):
    """KTO: the baseline is the whole split's, so losses are known at the end only."""

    def __init__(self, beta: float, compute_loss: Callable[[float, bool, float], float]) -> None:
        super().__init__()
        self._beta, self._compute_loss = beta, compute_loss
        self._rows: list[tuple[float, bool]] = []
        """How much more likely than in the reference each answer is, and whether it is good."""
        self._others = 0.0
        self._logps = {True: 0.0, False: 0.0}

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self._rows.append((record["ratio"], record["is_good"]))
            self._others += record["other"]
            self._logps[record["is_good"]] += record["logp"]
        self.examples += len(records)

    def _get_baseline(self) -> float:
        return max(0.0, self._others / len(self._rows)) if len(self._rows) > 1 else 0.0

    def get_mean_loss(self) -> float:
        baseline = self._get_baseline()
        losses = [self._compute_loss(ratio, is_good, baseline) for ratio, is_good in self._rows]
        return sum(losses) / len(losses) if losses else float("nan")

    def score(self) -> dict[str, float]:
        scores = {"kl": self._get_baseline()}
        for name, kind in _KTO_SPLIT:
            ratios = [ratio for ratio, is_good in self._rows if is_good is kind]
            if ratios:
                scores[f"rewards/{name}"] = self._beta * sum(ratios) / len(ratios)
                scores[f"logps/{name}"] = self._logps[kind] / len(ratios)
        if {"rewards/chosen", "rewards/rejected"} <= scores.keys():
            scores["rewards/margins"] = scores["rewards/chosen"] - scores["rewards/rejected"]
        return scores
