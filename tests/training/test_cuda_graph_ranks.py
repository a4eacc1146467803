"""``--cuda-graph`` on two ranks without a GPU: a stand-in runs recorded passes again instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rapidformer.accel.cuda_graph import graphs as graphed
from rapidformer.accel.cuda_graph import permission
from rapidformer.accel.cuda_graph.passes import Passes
from rapidformer.accel.dropout_seeds import apply_no_dropout
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError
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
STAGES = (1, 2, 3)


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
    evaluated: list[float]
    """The losses of all evaluations."""


Sharded = Callable[[int], list[dict[str, Trained]]]


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


def build_gpt2(freezes: bool) -> Any:
    model = make_gpt2()
    apply_no_dropout(model, changes_config=True)
    model.transformer.h[0].requires_grad_(not freezes)
    return model


def train(
    kind: str, capture: Again | None, most_graphs: int = 16, freezes: bool = False, **more: Any
) -> Trained:
    torch.set_num_threads(1)
    graphed.MOST_GRAPHS = most_graphs
    if kind == "gpt2":
        rows = make_texts(45 if freezes else 48)
    else:
        rows = make_rows(24, longest=20) + make_rows(24)
    run = Run(None, rows, capture, global_batch_size=8, clip_grad=CLIP, **more)
    if kind == "bert":  # under ZeRO-3, padding is removed only if there are weights to try it
        model = make_bert(0.0)
    else:
        model = run.engine.build_model(functools.partial(build_gpt2, freezes))
    run._model = model
    evaluated: list[float] = []

    def evaluate(model: Any, loader: Any) -> Any:
        evaluated.append(float(sum(model[0](**batch).loss for batch in loader)))
        return {"loss": evaluated[-1]}

    run.run_compute_metrics = evaluate  # type: ignore[method-assign]
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
        evaluated,
    )


def train_all() -> list[Trained]:
    return [
        train("gpt2", Again(), micro_batch_size=2),
        train("bert", Again(), micro_batch_size=4),
        train("bert", Fails(), micro_batch_size=4),
    ]


def train_sharded(stage: int, folder: str) -> dict[str, Trained]:
    zero = {f"zero_{stage}_memory_optimization": True}
    accumulated = {"micro_batch_size": 2, **zero}
    at_once = {"micro_batch_size": 4, **zero}
    # The last update has fewer rows on one rank.
    frozen = {**at_once, "freezes": True, "eval_interval": 2, "async_save": False}
    return {
        "texts": train("gpt2", Again(), **accumulated),
        "texts, off": train("gpt2", None, **accumulated),
        "texts, late": train("gpt2", Late(), **accumulated),
        "texts at once": train("gpt2", Again(), **at_once),
        "texts at once, off": train("gpt2", None, **at_once),
        "rows": train("bert", Again(), **at_once),
        "rows, never replayed": train("bert", Again(), 0, **at_once),
        "rows, fails": train("bert", Fails(), **at_once),
        "frozen": train("gpt2", Again(), **frozen),
        "frozen, off": train("gpt2", None, **frozen),
        "interrupted": train("gpt2", Again(), **frozen, exit_interval=3, save=folder),
        "resumed": train("gpt2", Again(), **frozen, save=folder, load=folder),
    }


@pytest.fixture(scope="module")
def on_ranks() -> list[list[Trained]]:
    """What each rank has trained."""
    return run_in_kept_processes(train_all, 2)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    """What each rank has trained, for each stage of ZeRO."""
    return functools.cache(
        lambda stage: run_in_kept_processes(
            train_sharded, 2, stage, str(tmp_path_factory.mktemp("run"))
        )
    )


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


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_rank_that_cannot_record_stops_all_of_them(
    on_ranks: list[list[Trained]], sharded: Sharded, stage: int
) -> None:
    ranks = [rank["rows, fails"] for rank in sharded(stage)] if stage else [r[2] for r in on_ranks]
    for mine in ranks:
        check(mine, train_alone("bert"))
        assert mine.problem == "rank 1: RuntimeError: no memory left"


@pytest.mark.parametrize("stage", STAGES)
def test_sharded_training_states(sharded: Sharded, stage: int) -> None:
    """ZeRO: the passes are replayed on whole weights, the optimizer updates the shards."""
    ranks = sharded(stage)
    for name, kind in (("texts", "gpt2"), ("texts at once", "gpt2"), ("rows", "bert")):
        alone = train_alone(kind)
        for rank in ranks:
            mine = rank[name]
            check(mine, alone)
            assert mine.problem is None
            assert mine.replayed > mine.recorded > 2, "passes, and the update as two graphs"
            assert mine.updated == len(alone.losses), "every update, the first ones without a graph"
        assert ranks[0][name].keys == ranks[1][name].keys


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("texts", "texts, off"), ("texts, late", "texts, off"), ("frozen", "frozen, off"),
        ("texts at once", "texts at once, off"), ("rows", "rows, never replayed"),
    ],
)  # fmt: skip
def test_sharded_updates_have_the_same_bits(
    sharded: Sharded, stage: int, name: str, other: str
) -> None:
    """As without graphs, and as passes that are never replayed; one rank may replay less.

    Replayed passes are summed over the ranks once, as those of ZeRO-1: the other stages do so for
    each micro-batch otherwise.
    """
    others = sharded(1 if other == "texts, off" else stage)
    for rank, of_others in zip(sharded(stage), others, strict=True):
        mine, theirs = rank[name], of_others[other]
        assert mine.replayed > 0
        assert theirs.keys == []
        assert mine.losses == theirs.losses
        assert mine.norms == theirs.norms
        assert mine.evaluated == theirs.evaluated
        assert max(mine.norms) > CLIP
        assert all(map(torch.equal, mine.weights, theirs.weights))


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_same_bits(sharded: Sharded, stage: int) -> None:
    """It evaluates between updates, and its last one has fewer rows on one rank."""
    for rank in sharded(stage):
        whole, first, rest = (rank[name] for name in ("frozen", "interrupted", "resumed"))
        assert (len(first.losses), len(whole.losses)) == (3, 6)
        assert min(whole.replayed, rest.replayed) > 0
        assert [*first.losses, *rest.losses] == whole.losses
        assert [*first.norms, *rest.norms] == whole.norms
        assert [*first.evaluated[:1], *rest.evaluated] == whole.evaluated
        assert len(set(whole.evaluated)) == 3
        assert all(map(torch.equal, rest.weights, whole.weights))


class Scaled(torch.nn.Module):
    """Has a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.head = torch.nn.Linear(4, 2)


def refuse(stage: int, kind: str, most: int) -> tuple[str | None, str]:
    """The obstacle, and what a user reads who insists."""
    model = Scaled() if kind == "scaled" else make_gpt2()
    zero = {f"zero_{stage}_memory_optimization": True}
    engine = RapidformerEngine(args={"micro_batch_size": 4, "lr": 0.1, **zero})
    engine.compose(model=model)
    parts = vars(engine.model.parallelized) | {"args": SimpleNamespace(cuda_graph="on")}
    assembly: Any = SimpleNamespace(**parts)
    message = ""
    with mock.patch.object(permission, "MOST_COPIED", most):
        obstacle = permission._find_obstacle(assembly)
        if obstacle is not None:
            with pytest.raises(ConfigurationError) as error:
                permission.apply(assembly)
            message = str(error.value)
    engine.close()
    return obstacle, message


def refuse_all(stage: int) -> list[tuple[str | None, str]]:
    return [refuse(stage, *each) for each in (("scaled", 2**31), ("gpt2", 2**31), ("gpt2", 10**5))]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_gathered_for_replayed_steps(stage: int) -> None:
    """Other stages than ZeRO-1 keep few weights whole."""
    for (number, message), (small, _), (large, _) in run_in_kept_processes(refuse_all, 2, stage):
        assert "single numbers" in str(number)
        assert message == f"--cuda-graph on: {number}. Leave the flag out."
        assert small is None
        assert (large is None) == (stage == 1)
        assert stage == 1 or f"GiB, and under ZeRO-{stage} no more than" in str(large)
