"""Metrics of preferences by TRL's names, each pair or answer once, as exact means over a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rapidformer.tasks.metrics.tally import MeanTally, Record, Tally

Combine = Callable[[float, Mapping[str, float]], float]


class PairTally(MeanTally):
    """Means over pairs, and means over tokens."""

    def __init__(self, combine: Combine) -> None:
        """``combine`` makes the loss of the mean over pairs and the means over tokens."""
        super().__init__()
        self._combine = combine

    def get_mean_loss(self) -> float:
        return self._combine(super().get_mean_loss(), self.score())


class RewardTally(MeanTally):
    """Means over pairs, and the range of all rewards."""

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
        self._logps, self._logits = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        self._tokens = {True: 0, False: 0}
        self._others = self._entropies = 0.0

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            is_good = record["is_good"]
            self._ratios[is_good].append(record["ratio"])
            self._logps[is_good] += record["logp"]
            self._logits[is_good] += record["logits"]
            self._tokens[is_good] += record["tokens"]
            self._others += record["other"]
            self._entropies += record["entropies"]

    def _get_baseline(self) -> float:
        return max(0.0, self._others / self.examples) if self.examples > 1 else 0.0

    def get_mean_loss(self) -> float:
        baseline = self._get_baseline()
        total = sum(self._sum_losses(r, kind, baseline) for kind, r in self._ratios.items())
        return total / self.examples if self.examples else float("nan")

    def score(self) -> dict[str, float]:
        tokens = sum(self._tokens.values())
        scores = {"kl": self._get_baseline(), "entropy": self._entropies / max(tokens, 1)}
        for name, kind in (("chosen", True), ("rejected", False)):
            if count := len(self._ratios[kind]):
                scores[f"rewards/{name}"] = self._beta * sum(self._ratios[kind]) / count
                scores[f"logps/{name}"] = self._logps[kind] / count
                scores[f"logits/{name}"] = self._logits[kind] / self._tokens[kind]
        if all(self._ratios.values()):
            scores["rewards/margins"] = scores["rewards/chosen"] - scores["rewards/rejected"]
        return scores
