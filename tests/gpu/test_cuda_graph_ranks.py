"""``--cuda-graph`` on two ranks that share one GPU: gloo's collectives take CUDA tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from rapidformer.accel.cuda_graph import graphs
from rapidformer.accel.dropout_seeds import apply_no_dropout
from rapidformer.dist.whole import get_shard
from tests.processes import find_free_port
from tests.training.test_cuda_graph import Run, make_bert, make_gpt2, make_rows, make_texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PADDED: dict[str, Any] = {"kind": "bert", "mixed_precision": "bf16"}
STAGES = (1, 2, 3)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {f"zero_{stage}_memory_optimization": True, **more}


CASES: dict[str, dict[str, Any]] = {
    "fixed": {"micro_batch_size": 2},
    "fixed, no graph": {"micro_batch_size": 2, "cuda_graph": "off"},
    "recompute": {"micro_batch_size": 2, "checkpoint_activations": True},
    "dropout": {**PADDED, "dropout": 0.1},
    "dropout, never replayed": {**PADDED, "dropout": 0.1, "most_graphs": 0},
    "lengths": PADDED,
}
for stage in STAGES:
    CASES |= {
        f"zero {stage}": zero(stage, micro_batch_size=2),
        f"zero {stage}, at once": zero(stage, micro_batch_size=4),
        f"zero {stage}, at once, no graph": zero(stage, micro_batch_size=4, cuda_graph="off"),
        f"zero {stage}, dropout": zero(stage, dropout=0.1, **PADDED),
        f"zero {stage}, dropout, never replayed": zero(stage, dropout=0.1, most_graphs=0, **PADDED),
    }
# Gradients of several micro-batches are summed over the ranks once, as replayed ones are.
CASES["zero, no graph"] = zero(1, micro_batch_size=2, cuda_graph="off")


def train(
    kind: str = "gpt2", dropout: float = 0.0, most_graphs: int = 8, **settings: Any
) -> dict[str, Any]:
    graphs.MOST_GRAPHS = most_graphs
    if kind == "gpt2":
        model, rows = make_gpt2(), make_texts(64)
        apply_no_dropout(model, changes_config=True)
    else:
        model, rows = make_bert(dropout), make_rows(128)
    more = {"global_batch_size": 8, "lr": 1e-3, "cuda_graph": "auto", **settings}
    run = Run(model, rows, None, **more)
    run.run_compute_metrics = lambda *_: {"loss": 0.0}  # type: ignore[method-assign]
    run.train()
    found = run.engine.updates.graphs
    result = {
        "lines": run.values.lines,
        "weights": [get_shard(p.detach()).cpu() for p in run.engine.model.parameters],
        "count": found.count if found else 0,
        "updates": found.updates if found else False,
        "problem": found.problem if found else None,
        "keys": [key[0] for key in found._graphs] if found else [],  # type: ignore[index]
    }
    run.engine.close()
    return result


def train_on_rank(rank: int, port: int, folder: str) -> None:
    # Both ranks on the first device.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    make_deterministic()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    # What ZeRO exchanges; gloo has neither for CUDA tensors, and the first one crashes. From torch
    # 2.13 on, they have other names.
    dist.reduce_scatter_tensor = dist.reduce_scatter_single = reduce_scatter
    dist.all_gather_into_tensor = dist.all_gather_single = all_gather
    torch.save({name: train(**case) for name, case in CASES.items()}, f"{folder}/{rank}")


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, **options: Any) -> None:
    """By gloo's sum of whole tensors."""
    summed = input.clone()
    dist.all_reduce(summed, group=options["group"])
    output.copy_(summed.chunk(2)[dist.get_rank()])


def all_gather(output: torch.Tensor, input: torch.Tensor, **options: Any) -> None:
    part = input.clone()  # it may be a part of the output
    output.zero_()
    output.chunk(2)[dist.get_rank()].copy_(part)
    dist.all_reduce(output, group=options["group"])


def make_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


Trained = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(train_on_rank, (find_free_port(), str(folder)), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(2)]


def get_losses(trained: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in trained["lines"]]


def test_a_replayed_update_is_that_of_the_passes(on_ranks: list[Trained]) -> None:
    """Losses, norms and weights, bit by bit; accumulated, with dropout, and rows of any length."""
    for rank in on_ranks:
        for mine, theirs in (("fixed", "fixed, no graph"), ("dropout", "dropout, never replayed")):
            assert rank[mine]["problem"] is None
            assert rank[mine]["count"] > 0 and rank[mine]["updates"]
            assert rank[mine]["lines"] == rank[theirs]["lines"]
            assert all(map(torch.equal, rank[mine]["weights"], rank[theirs]["weights"]))
    assert on_ranks[0]["dropout"]["keys"] == on_ranks[1]["dropout"]["keys"]


@pytest.mark.parametrize("stage", STAGES)
def test_sharded_training_states(on_ranks: list[Trained], stage: int) -> None:
    """ZeRO: passes are replayed on whole weights, the update on shards; bit by bit."""
    name = f"zero {stage}"
    pairs = (
        (name, "zero, no graph"), (f"{name}, at once", f"{name}, at once, no graph"),
        (f"{name}, dropout", f"{name}, dropout, never replayed"),
    )  # fmt: skip
    for rank in on_ranks:
        for mine, theirs in pairs:
            assert rank[mine]["problem"] is None
            assert rank[mine]["count"] > 0 and rank[mine]["updates"]
            assert rank[mine]["lines"] == rank[theirs]["lines"]
            assert all(map(torch.equal, rank[mine]["weights"], rank[theirs]["weights"]))


def test_two_ranks_train_what_one_process_does(on_ranks: list[Trained]) -> None:
    make_deterministic()
    fixed = train(micro_batch_size=4, cuda_graph="off")
    lengths = train(**PADDED, cuda_graph="off")
    torch.use_deterministic_algorithms(False)
    for number, rank in enumerate(on_ranks):
        for name in ("fixed", "recompute", *(f"zero {stage}" for stage in STAGES)):
            assert rank[name]["count"] > 0
            assert get_losses(rank[name]) == pytest.approx(get_losses(fixed), rel=1e-5)
            for mine, whole in zip(rank[name]["weights"], fixed["weights"], strict=True):
                theirs = whole.chunk(2)[number] if name.startswith("zero") else whole
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        assert rank["lengths"]["count"] > 1
        assert get_losses(rank["lengths"]) == pytest.approx(get_losses(lengths), rel=2e-2)
