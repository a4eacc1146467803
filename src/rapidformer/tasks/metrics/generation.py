"""BLEU and ROUGE of generated texts, in percent, overall and by language pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rapidformer.tasks.metrics.tables import ReportTable, ScoreTable
from rapidformer.tasks.metrics.tally import Record, Tally, compute_perplexity

_ROUGE_KEYS = ("rouge1", "rouge2", "rougeL")


class Bleu:
    """Running corpus BLEU, equal to sacreBLEU's default (13a tokens, exponential smoothing)."""

    def __init__(self) -> None:
        import torch
        from torchmetrics.text import SacreBLEUScore

        # In fp32, counts above 16 million would not be exact.
        self._counts: Any = SacreBLEUScore().set_dtype(torch.float64)

    def add(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
        """Add texts, each with one or more references."""
        self._counts.update(texts, references)

    def score(self) -> float:
        """torchmetrics counts the n-grams, but does not have sacreBLEU's smoothing."""
        matches, totals = self._counts.numerator.tolist(), self._counts.denominator.tolist()
        length, wanted = float(self._counts.preds_len), float(self._counts.target_len)
        if not any(matches) or not all(totals):
            return 0.0
        logs, factor = 0.0, 1.0
        for match, total in zip(matches, totals, strict=True):
            factor = factor if match else 2 * factor
            logs += math.log(match / total if match else 1 / (factor * total))
        brevity = math.exp(1 - wanted / length) if length < wanted else 1.0
        return 100 * brevity * math.exp(logs / len(matches))


class TextScores:
    """Running scores of generated texts: BLEU, and the mean F1 of ROUGE."""

    def __init__(self) -> None:
        self._bleu = Bleu()
        self._rouge = dict.fromkeys(_ROUGE_KEYS, 0.0)
        self._words = 0
        self.count = 0

    def add(self, texts: Sequence[str], wanted: Sequence[str]) -> None:
        """Add generated texts and their references."""
        from torchmetrics.functional.text import rouge_score

        if not texts:
            return
        texts = [text.strip() for text in texts]
        wanted = [text.strip() for text in wanted]
        self._bleu.add(texts, [[text] for text in wanted])
        # torchmetrics' own class for ROUGE keeps the scores of every text.
        scores = rouge_score(texts, wanted, rouge_keys=_ROUGE_KEYS)
        for key in _ROUGE_KEYS:
            self._rouge[key] += len(texts) * float(scores[f"{key}_fmeasure"])
        self._words += sum(len(text.split()) for text in texts)
        self.count += len(texts)

    def score(self) -> dict[str, float]:
        rouge = {key: 100 * total / max(1, self.count) for key, total in self._rouge.items()}
        return {"bleu": self._bleu.score(), **rouge}

    def get_mean_words(self) -> float:
        """The mean length of the generated texts."""
        return self._words / max(1, self.count)


def compute_generation(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The scores of all texts at once."""
    scores = TextScores()
    scores.add(predictions, references)
    return scores.score()


# From the first row and the number of rows: their targets and language pairs.
ReadTargets = Callable[[int, int], tuple[list[str], list[str]]]


class TextTally(Tally):
    """Records with ``generated`` ids; targets are read from the data when they are needed."""

    def __init__(self, decode: Callable[[Record], str], read_targets: ReadTargets) -> None:
        super().__init__()
        self._decode, self._read_targets = decode, read_targets
        self._scores = TextScores()
        self._by_pair: dict[str, TextScores] = {}

    def add(self, records: Sequence[Record]) -> None:
        texts = [self._decode(record) for record in records]
        wanted, pairs = self._read_targets(self.examples, len(records))
        self._scores.add(texts, wanted)
        for pair in dict.fromkeys(name for name in pairs if name):
            chosen = [row for row, name in enumerate(pairs) if name == pair]
            scores = self._by_pair.setdefault(pair, TextScores())
            scores.add([texts[row] for row in chosen], [wanted[row] for row in chosen])
        self.examples += len(records)

    def score(self) -> dict[str, float]:
        return {
            "perplexity": compute_perplexity(self.get_mean_loss()),
            **self._scores.score(),
            "generated_words": self._scores.get_mean_words(),
        }

    def tables(self) -> list[ReportTable]:
        if not self._by_pair:
            return []
        rows = {pair: _describe(scores) for pair, scores in sorted(self._by_pair.items())}
        averages = {"all": _describe(self._scores)} if len(rows) > 1 else {}
        title = "by language pair"
        return [ScoreTable(key="language_pairs", title=title, rows=rows, averages=averages)]


def _describe(scores: TextScores) -> dict[str, float]:
    return {**scores.score(), "support": scores.count}
