"""Metrics of rankings, as sentence-transformers' evaluators define them.

All of them follow from the ranks of the relevant documents: nothing is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rapidformer.tasks.metrics.classification import compute_regression
from rapidformer.tasks.metrics.tally import Record, Tally

if TYPE_CHECKING:
    import torch

_CUTS = (1, 3, 5, 10)
RANKING_METRICS = (
    *(f"accuracy@{k}" for k in _CUTS),
    *(f"recall@{k}" for k in _CUTS), "mrr@10", "ndcg@10", "map@100",
)  # fmt: skip
_CHUNK = 1 << 24
"""Scores in memory at once."""


def score_ranks(rankings: Sequence[Sequence[int]]) -> dict[str, float]:
    """The means over queries; each has the ranks of all its relevant documents, from 0."""
    values: dict[str, list[float]] = {name: [] for name in RANKING_METRICS}
    for ranking in rankings:
        ranks = sorted(ranking)
        for k in _CUTS:
            found = sum(rank < k for rank in ranks)
            values[f"accuracy@{k}"].append(float(found > 0))
            values[f"recall@{k}"].append(found / len(ranks))
        values["mrr@10"].append(1 / (ranks[0] + 1) if ranks[0] < 10 else 0.0)
        gain = sum(1 / math.log2(rank + 2) for rank in ranks if rank < 10)
        best = sum(1 / math.log2(rank + 2) for rank in range(min(len(ranks), 10)))
        values["ndcg@10"].append(gain / best)
        precisions = [(n + 1) / (rank + 1) for n, rank in enumerate(ranks) if rank < 100]
        values["map@100"].append(sum(precisions) / min(len(ranks), 100))
    return {name: sum(each) / len(each) for name, each in values.items()}


class EmbeddingTally(Tally):
    """Retrieval among all documents of the split, accuracy of triplets, correlation with scores.

    Equal texts are one query or one document. ``compute_loss`` gets the records of so many rows as
    a batch has and returns their loss as a sum with its count.
    """

    def __init__(
        self, compute_loss: Callable[[Sequence[Record]], tuple[float, float]], batch_size: int
    ) -> None:
        super().__init__()
        self._compute_loss, self._batch_size = compute_loss, batch_size
        self._records: list[Record] = []

    def update(self, records: Sequence[Record]) -> None:
        self._records += records
        self.examples += len(records)

    def add(self, records: Sequence[Record]) -> None:
        raise NotImplementedError("update() keeps the records")

    def get_mean_loss(self) -> float:
        """In-batch negatives depend on the batch: here batches are in the order of the data."""
        starts = range(0, len(self._records), self._batch_size)
        parts = [self._compute_loss(self._records[s : s + self._batch_size]) for s in starts]
        count = sum(count for _, count in parts)
        return sum(total for total, _ in parts) / count if count else float("nan")

    def score(self) -> dict[str, float]:
        import torch

        records, scores = self._records, {}
        vectors = [torch.from_numpy(record["vectors"]) for record in records]
        vectors = [torch.nn.functional.normalize(each, dim=-1) for each in vectors]
        if len(records[0]["scores"]) == 1 and all(len(each) == 2 for each in vectors):
            cosines = [float(each[0] @ each[1]) for each in vectors]
            found = compute_regression(cosines, [record["scores"][0] for record in records])
            return {name: found[name] for name in ("pearson", "spearmanr")}
        triplets = [each[1] @ each[0] > each[2:] @ each[0] for each in vectors if len(each) > 2]
        if triplets:
            scores["triplet_accuracy"] = float(torch.cat(triplets).double().mean())
        return {**scores, **score_ranks(_rank(records, vectors))}


def _rank(records: Sequence[Record], vectors: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each query, the ranks of its positives among all documents; ties in order of the data."""
    import torch

    queries: dict[int, torch.Tensor] = {}
    corpus: dict[int, torch.Tensor] = {}
    relevant: dict[tuple[int, int], None] = {}
    for record, each in zip(records, vectors, strict=True):
        query, positive, *_ = record["ids"]
        queries.setdefault(query, each[0])
        for name, vector in zip(record["ids"][1:], each[1:], strict=True):
            corpus.setdefault(name, vector)
        relevant[query, positive] = None
    places = {name: place for place, name in enumerate(corpus)}
    documents = torch.stack(list(corpus.values()))
    rankings: dict[int, list[int]] = {query: [] for query in queries}
    pairs = list(relevant)
    step = max(1, _CHUNK // len(documents))
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        scores = torch.stack([queries[query] for query, _ in part]) @ documents.T
        place = torch.tensor([places[name] for _, name in part])[:, None]
        own = scores.gather(1, place)
        is_before = torch.arange(len(documents)) < place
        ranks = ((scores > own) | ((scores == own) & is_before)).sum(1).tolist()
        for (query, _), rank in zip(part, ranks, strict=True):
            rankings[query].append(rank)
    return list(rankings.values())


class RerankingTally(Tally):
    """How the documents of each query are ranked, and how their scores agree with the labels."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: dict[int, list[tuple[float, float]]] = {}
        """By query: the logit and the label of each document."""

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            pairs = zip(record["logits"].tolist(), record["scores"], strict=True)
            self._lists.setdefault(record["ids"][0], []).extend(pairs)

    def score(self) -> dict[str, float]:
        pairs = [pair for pairs in self._lists.values() for pair in pairs]
        logits, labels = [logit for logit, _ in pairs], [label for _, label in pairs]
        hits = sum((logit > 0) == (label > 0.5) for logit, label in pairs)
        scores = {"accuracy": hits / len(pairs)}
        if len(set(labels)) > 1:
            scores["spearmanr"] = compute_regression(logits, labels)["spearmanr"]
        rankings = [ranks for ranks in map(_rank_list, self._lists.values()) if ranks]
        return {**scores, **(score_ranks(rankings) if rankings else {})}


def _rank_list(pairs: Sequence[tuple[float, float]]) -> list[int]:
    """The ranks of the relevant documents of a query; none if all or none are relevant."""
    order = sorted(range(len(pairs)), key=lambda place: -pairs[place][0])
    ranks = [rank for rank, place in enumerate(order) if pairs[place][1] > 0.5]
    return ranks if len(ranks) < len(pairs) else []
