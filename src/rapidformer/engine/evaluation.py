"""Predict with a model: every sample exactly once, results in the data's order on every rank.

Samples are sorted by length inside groups of many batches, so little is computed on padding, and a
group's results are handed out as soon as it is done. Groups and batches do not depend on the number
of ranks: a batch has the same rows and the same random numbers on one rank as on many, so sampled
text is the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch

from rapidformer.data.fetching import Collate
from rapidformer.data.loader import DistributedLoader
from rapidformer.data.rounds import sort_in_groups
from rapidformer.data.update import MicroBatch
from rapidformer.dist.collectives import gather_objects
from rapidformer.dist.topology import Topology
from rapidformer.engine.data import RunData
from rapidformer.engine.model import RunModel
from rapidformer.errors import RapidformerError

GROUP_BATCHES = 16
"""Batches whose samples are sorted together, and whose results come together."""

T = TypeVar("T")
Step = Callable[[Any], Sequence[Any] | torch.Tensor]
"""From a batch to one result per row, in order."""


class LateResults(Sequence[Any]):
    """A batch's results, read off the device when somebody asks: until then, nothing waits."""

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        self._read: Callable[[], list[Any]] | None = read

    @cached_property
    def _results(self) -> list[Any]:
        assert self._read is not None
        results = self._read()
        self._read = None  # it holds tensors
        return results

    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)


def predict_rows(
    data: RunData,
    model: RunModel,
    dataset: Any,
    step: Step,
    collate_fn: Collate | None = None,
    *,
    batch_size: int | None = None,
    lengths: Sequence[int] | None = None,
    seed: int | None = None,
) -> Iterator[Any]:
    """One result per sample of the data set, in its order, on every rank.

        step = lambda batch: model(**batch).logits.argmax(-1)
        for answer in predict_rows(engine.data, engine.model, rows, step):

    ``step`` takes a batch and returns one result per row. With ``lengths``, samples of similar
    length share a batch. With ``seed``, random numbers follow from it and the batch alone.
    """
    groups = predict_in_groups(
        data, model, dataset, step, collate_fn, batch_size=batch_size, lengths=lengths, seed=seed
    )
    for results in groups:
        yield from results


def predict_in_groups(
    data: RunData,
    model: RunModel,
    dataset: Any,
    step: Step,
    collate_fn: Collate | None = None,
    *,
    batch_size: int | None = None,
    lengths: Sequence[int] | None = None,
    seed: int | None = None,
    sizes: Sequence[int] | None = None,
    start: int = 0,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[list[Any]]:
    """As ``predict_rows``, but one list per group of ``sizes``; ``advance`` counts samples."""
    size = data.get_prediction_batch_size(batch_size)
    groups = list(sizes or cut_into_groups(len(dataset) - start, size))
    order = sort_in_groups(groups, lengths, start)
    loader = data.build_loader(
        dataset, collate_fn, shuffle=False, batch_size=size, is_training=False, order=order
    )
    batches = run_batches(loader, step, seed=seed, first_batch=start // size)
    results: list[Any] = []
    done, end = 0, 0
    for count in groups:
        end += count
        rounds: list[tuple[Sequence[Any], int]] = []  # results with the number of rows
        with model.evaluating():
            needed = -(-(end - done) // loader.samples_per_round)
            for micro_batch, result in islice(batches, needed):
                rows = micro_batch.info.rows
                held = result if isinstance(result, LateResults) else _take_rows(result, rows)
                rounds.append((held, rows))
                done += loader.samples_per_round
                # The very last round may be padded to the same size on all ranks.
                advance(loader.samples_per_round - max(done - loader.num_samples, 0))
        results += gather_rounds([_take_rows(*each) for each in rounds], data.topology)
        places = order[end - count : end]
        pairs = sorted(zip(places, results, strict=False), key=itemgetter(0))
        yield [result for _, result in pairs]
        del results[:count]


def run_batches(
    loader: DistributedLoader,
    step: Callable[[Any], T],
    *,
    seed: int | None = None,
    first_batch: int = 0,
) -> Iterator[tuple[MicroBatch, T]]:
    """What a step makes of each of this rank's batches, among them fillers, which have no rows."""
    devices = [loader.device] if loader.device.type == "cuda" else []
    for micro_batch in loader.iterate_micro_batches():
        with nullcontext() if seed is None else torch.random.fork_rng(devices):
            if seed is not None:
                words = [number % 2**63 for number in (seed, first_batch + micro_batch.number)]
                torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))
            result = step(micro_batch.batch)
        yield micro_batch, result


def cut_into_groups(samples: int, batch_size: int) -> list[int]:
    """The sizes of groups of whole batches; only the last may be smaller."""
    size = GROUP_BATCHES * batch_size
    return [min(size, samples - start) for start in range(0, samples, size)]


def gather_rounds(rounds: list[list[T]], topology: Topology) -> list[T]:
    """One list of results from the rounds of all ranks, in the order of the loader's samples."""
    everyone = gather_objects(rounds, topology)
    # Round by round, rank by rank: so the loader has distributed the samples.
    return [r for slices in zip(*everyone, strict=True) for results in slices for r in results]


def _take_rows(returned: Any, rows: int) -> list[Any]:
    results = list(returned.cpu() if isinstance(returned, torch.Tensor) else returned)
    if len(results) < rows:
        raise RapidformerError(
            f"the step of predict() returned {len(results)} results for a batch of {rows} rows: "
            "return one per row."
        )
    return results[:rows]
