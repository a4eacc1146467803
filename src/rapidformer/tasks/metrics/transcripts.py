"""Word and character error rates of transcripts, over all rows: edits / words, equal to jiwer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rapidformer.tasks.metrics.tally import Record, Tally


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
        self.examples += len(records)

    def score(self) -> dict[str, float]:
        return {name: edits / max(self._sizes[name], 1) for name, edits in self._edits.items()}
