"""``--cuda-graph`` on two ranks without a GPU: a stand-in runs recorded passes again instead."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rapidformer.accel.cuda_graph import graphs as graphed
from rapidformer.accel.cuda_graph.passes import Passes
from rapidformer.accel.dropout_seeds import apply_no_dropout
from tests.processes import run_in_kept_processes
from tests.training.test_cuda_graph import (
    Again,
    Outcome,
    Recordable,
    Run,
    make_bert,
    make_gpt2,
    make_rows,
    make_texts,
)

CLIP = 0.25


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: list[torch.Tensor]
    keys: list[Any]
    """Of all graphs, without what the code depends on."""
    recorded: int
    replayed: int
    updated: int
    """By the second graph."""
    problem: str | None


class Fails(Again):
    """Cannot record on the second rank."""

    def record(self, function: Any) -> tuple[Outcome, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory left")
        return super().record(function)


class Late(Again):
    """Records passes, but no update on the second rank."""

    def record(self, function: Any) -> tuple[Outcome, Any]:
        is_update = not isinstance(getattr(function, "__self__", None), Passes)
        if dist.get_rank() == 1 and is_update:
            raise RuntimeError("no memory left")
        return super().record(function)


def train(kind: str, capture: Again | None, most_graphs: int = 16, **more: Any) -> Trained:
    torch.set_num_threads(1)
    graphed.MOST_GRAPHS = most_graphs
    if kind == "gpt2":
        model, rows = make_gpt2(), make_texts(48)
        apply_no_dropout(model, changes_config=True)
    else:
        model, rows = make_bert(0.0), make_rows(24, longest=20) + make_rows(24)
    run = Run(model, rows, capture, global_batch_size=8, clip_grad=CLIP, **more)
    run.run_compute_metrics = lambda *_: {"loss": 0.0}  # type: ignore[method-assign]
    optimizer = run.optimizer = Recordable(model.parameters(), lr=1e-3, eps=1e-5)
    run.train()
    graphs = run.engine.updates.graphs if capture is not None else None
    return Trained(
        [line["loss"] for line in run.values.lines],
        [line["grad_norm"] for line in run.values.lines],
        [run.engine.model.gather_weight(p).detach().clone() for p in run.engine.model.parameters],
        [key[0] for key in graphs._graphs] if graphs else [],  # type: ignore[index]
        capture.recorded if capture else 0,
        capture.replayed if capture else 0,
        optimizer.launches,
        graphs.problem if graphs else None,
    )


def train_all() -> list[Trained]:
    return [
        train("gpt2", Again(), micro_batch_size=2),
        train("bert", Again(), micro_batch_size=4),
        train("bert", Fails(), micro_batch_size=4),
        train("gpt2", Again(), micro_batch_size=2, zero_1_memory_optimization=True),
        train("bert", Again(), micro_batch_size=4, zero_1_memory_optimization=True),
        train("bert", Fails(), micro_batch_size=4, zero_1_memory_optimization=True),
        train("gpt2", None, micro_batch_size=2, zero_1_memory_optimization=True),
        train("bert", Again(), 0, micro_batch_size=4, zero_1_memory_optimization=True),
        train("gpt2", Late(), micro_batch_size=2, zero_1_memory_optimization=True),
    ]


@pytest.fixture(scope="module")
def on_ranks() -> list[list[Trained]]:
    """What each rank has trained."""
    return run_in_kept_processes(train_all, 2)


@functools.cache
def train_alone(kind: str) -> Trained:
    """In one process, without graphs."""
    return train(kind, None)


def check(mine: Trained, theirs: Trained) -> None:
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert mine.norms == pytest.approx(theirs.norms, rel=1e-4)
    for weight, other in zip(mine.weights, theirs.weights, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_two_ranks_replay_what_one_process_computes(on_ranks: list[list[Trained]]) -> None:
    """Accumulated updates of fixed sizes, and rows of different lengths; the update, too."""
    for number, kind in enumerate(("gpt2", "bert")):
        alone = train_alone(kind)
        for rank in on_ranks:
            mine = rank[number]
            check(mine, alone)
            assert mine.problem is None
            assert mine.replayed > mine.recorded > 1
            assert mine.updated == len(alone.losses), "every update, the first ones without a graph"


def test_ranks_agree_on_sizes_although_their_rows_differ(on_ranks: list[list[Trained]]) -> None:
    first, second = on_ranks[0][1], on_ranks[1][1]
    assert len(first.keys) > 1
    assert first.keys == second.keys
    assert (first.recorded, first.replayed) == (second.recorded, second.replayed)


@pytest.mark.parametrize("number", [2, 5])
def test_a_rank_that_cannot_record_stops_all_of_them(
    on_ranks: list[list[Trained]], number: int
) -> None:
    alone = train_alone("bert")
    for rank in on_ranks:
        check(rank[number], alone)
        assert rank[number].problem == "rank 1: RuntimeError: no memory left"


def test_sharded_optimizer_states(on_ranks: list[list[Trained]]) -> None:
    """ZeRO-1: the passes are replayed on whole weights, the optimizer updates the shards."""
    for number, kind in ((3, "gpt2"), (4, "bert")):
        alone = train_alone(kind)
        for rank in on_ranks:
            mine = rank[number]
            check(mine, alone)
            assert mine.problem is None
            assert mine.replayed > mine.recorded > 2, "passes, and the update as two graphs"
            assert mine.updated == len(alone.losses), "every update, the first ones without a graph"
        assert on_ranks[0][number].keys == on_ranks[1][number].keys


@pytest.mark.parametrize(("number", "other"), [(3, 6), (4, 7), (8, 6)])
def test_sharded_updates_have_the_same_bits(
    on_ranks: list[list[Trained]], number: int, other: int
) -> None:
    """As without graphs, and as passes that are never replayed; one rank may replay less."""
    for rank in on_ranks:
        mine, theirs = rank[number], rank[other]
        assert theirs.keys == []
        assert mine.losses == theirs.losses
        assert mine.norms == theirs.norms
        assert max(mine.norms) > CLIP
        assert all(map(torch.equal, mine.weights, theirs.weights))
