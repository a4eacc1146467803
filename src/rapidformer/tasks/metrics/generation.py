"""Scores of texts: BLEU and ROUGE of generated ones and SQuAD's of answers in percent, and the word
and character error rates of transcripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rapidformer.tasks.metrics.tally import (
    Record,
    ReportTable,
    ScoreTable,
    Tally,
    compute_perplexity,
)

_ROUGE_KEYS = ("rouge1", "rouge2", "rougeL")
_PARTS = ("has_answer", "no_answer")


class Bleu:
    """Running corpus BLEU, equal to sacreBLEU's default (13a tokens, exponential smoothing)."""

    def __init__(self) -> None:
        import torch
        from torchmetrics.text import SacreBLEUScore

        # In fp32, counts above 16 million would not be exact.
        self._counts: Any = SacreBLEUScore().set_dtype(torch.float64)

    def add(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
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
        return self._words / max(1, self.count)


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
        return [ScoreTable("language_pairs", "by language pair", rows, averages)]


def _describe(scores: TextScores) -> dict[str, float]:
    return {**scores.score(), "support": scores.count}


class AnswerScores:
    """Running scores of answers; an empty answer is right if the question has no answer."""

    def __init__(self) -> None:
        import torch
        from torchmetrics.text import SQuAD

        self._parts: dict[str, Any] = {name: SQuAD().set_dtype(torch.float64) for name in _PARTS}

    def add(self, answer: str, wanted: Sequence[str]) -> None:
        """Add the answer to one question, and the right answers."""
        prediction = {"id": "0", "prediction_text": answer}
        # An unanswerable question is scored as if its answer were the empty string.
        target: Any = {"id": "0", "answers": {"text": list(wanted) or [""], "answer_start": [0]}}
        self._parts["has_answer" if wanted else "no_answer"].update([prediction], [target])

    def score(self) -> dict[str, float]:
        """Scores over all questions and, if there are both, by whether there is an answer."""
        result = self._read(*_PARTS)
        parts = [name for name in _PARTS if self._count(name)]
        for name in parts if len(parts) == 2 else ():
            result |= {f"{name}_{key}": value for key, value in self._read(name).items()}
        return result

    def tables(self) -> list[ReportTable]:
        """A row for questions with an answer and one for those without, if there are both."""
        titles = {"has_answer": "has an answer", "no_answer": "has no answer"}
        rows: dict[str, Mapping[str, float]] = {
            title: {**self._read(name), "support": self._count(name)}
            for name, title in titles.items()
            if self._count(name)
        }
        if len(rows) < 2:
            return []
        every = {"all": {**self._read(*_PARTS), "support": self._count(*_PARTS)}}
        return [ScoreTable("questions", "by question", rows, every)]

    def _count(self, *parts: str) -> int:
        return sum(int(self._parts[part].total) for part in parts)

    def _read(self, *parts: str) -> dict[str, float]:
        exact = sum(float(self._parts[part].exact_match) for part in parts)
        f1 = sum(float(self._parts[part].f1_score) for part in parts)
        count = self._count(*parts)
        return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}


def compute_squad(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The scores of all questions at once."""
    scores = AnswerScores()
    for answer, wanted in zip(predictions, references, strict=True):
        scores.add(answer, wanted)
    return scores.score()


def count_edits(text: Sequence[str], wanted: Sequence[str]) -> int:
    """The fewest insertions, deletions and substitutions that make one sequence of the other."""
    import numpy as np

    numbers = {item: number for number, item in enumerate(dict.fromkeys((*text, *wanted)))}
    goal = np.array([numbers[item] for item in wanted], dtype=np.int64)
    places = np.arange(len(goal) + 1)
    costs = places
    for row, item in enumerate(text, start=1):
        changed = np.minimum(costs[:-1] + (goal != numbers[item]), costs[1:] + 1)
        # What is missing on the way along a row costs one each: a running minimum.
        best = np.concatenate(([row], changed)) - places
        costs = np.minimum.accumulate(best) + places
    return int(costs[-1])


class TranscriptTally(Tally):
    """Records with the ids of a ``transcript``; what was said is read when it is needed."""

    def __init__(
        self, decode: Callable[[Record], str], read_wanted: Callable[[int, int], list[str]]
    ) -> None:
        """``read_wanted`` gets the number of the first row and of the rows."""
        super().__init__()
        self._decode, self._read_wanted = decode, read_wanted
        self._edits = {"wer": 0, "cer": 0}
        self._sizes = {"wer": 0, "cer": 0}

    def add(self, records: Sequence[Record]) -> None:
        wanted = self._read_wanted(self.examples, len(records))
        for record, target in zip(records, wanted, strict=True):
            said, heard = target.split(), self._decode(record).split()
            parts = {"wer": (heard, said), "cer": (list(" ".join(heard)), list(" ".join(said)))}
            for name, (text, goal) in parts.items():
                self._edits[name] += count_edits(text, goal)
                self._sizes[name] += len(goal)

    def score(self) -> dict[str, float]:
        return {name: edits / max(self._sizes[name], 1) for name, edits in self._edits.items()}
