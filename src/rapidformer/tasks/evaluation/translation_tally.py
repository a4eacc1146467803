"""Score generated texts while they arrive, overall and by language pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rapidformer.tasks.metrics.generation import TextScores
from rapidformer.tasks.metrics.perplexity import compute_perplexity
from rapidformer.tasks.metrics.tables import ReportTable, ScoreTable
from rapidformer.tasks.metrics.tally import Record, Tally

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
