"""Metrics of preferences by TRL's names, each pair or answer once, as exact means over a split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rapidformer.tasks.metrics.tally import Record, Tally


class PairTally(Tally):
    """Means over pairs; the likelihood of better answers is a mean over their tokens."""

    def __init__(
        self,
        combine: Callable[[float, float], float] | None = None,
        likelihood_name: str | None = None,
    ) -> None:
        """``combine`` joins the mean losses of pairs and of likelihoods, if there are both."""
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
        return self._combine(loss, self._get_likelihood()) if self._combine else loss

    def score(self) -> dict[str, float]:
        means = {name: total / max(self.examples, 1) for name, total in self._sums.items()}
        if self._likelihood_name:
            means[self._likelihood_name] = self._get_likelihood()
        return means

    def _get_likelihood(self) -> float:
        return self._likelihood / self._tokens if self._tokens else 0.0


class RewardTally(PairTally):
    """Also the range of all rewards."""

    _least, _most = float("inf"), float("-inf")

    def add(self, records: Sequence[Record]) -> None:
        super().add(records)
        for record in records:
            self._least = min(self._least, *record["rewards"])
            self._most = max(self._most, *record["rewards"])

    def score(self) -> dict[str, float]:
        return {**super().score(), "min_reward": self._least, "max_reward": self._most}


class AnswerTally(Tally):
    """KTO: the baseline is the whole split's, so losses are known at the end only."""

    def __init__(
        self, beta: float, sum_losses: Callable[[Sequence[float], bool, float], float]
    ) -> None:
        super().__init__()
        self._beta, self._sum_losses = beta, sum_losses
        self._ratios: dict[bool, list[float]] = {True: [], False: []}
        """How much more likely than in the reference good and bad answers are."""
        self._logps = {True: 0.0, False: 0.0}
        self._others = 0.0

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            self._ratios[record["is_good"]].append(record["ratio"])
            self._logps[record["is_good"]] += record["logp"]
            self._others += record["other"]
        self.examples += len(records)

    def _get_baseline(self) -> float:
        return max(0.0, self._others / self.examples) if self.examples > 1 else 0.0

    def get_mean_loss(self) -> float:
        baseline = self._get_baseline()
        total = sum(self._sum_losses(r, kind, baseline) for kind, r in self._ratios.items())
        return total / self.examples if self.examples else float("nan")

    def score(self) -> dict[str, float]:
        scores = {"kl": self._get_baseline()}
        for name, kind in (("chosen", True), ("rejected", False)):
            if count := len(self._ratios[kind]):
                scores[f"rewards/{name}"] = self._beta * sum(self._ratios[kind]) / count
                scores[f"logps/{name}"] = self._logps[kind] / count
        if all(self._ratios.values()):
            scores["rewards/margins"] = scores["rewards/chosen"] - scores["rewards/rejected"]
        return scores
