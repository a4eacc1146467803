"""In-batch negatives are those of the global batch, under every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel

from rapidformer.data.update import Update
from rapidformer.dist.collectives import gather_rows, sum_over_rows
from rapidformer.engine import RapidformerEngine
from rapidformer.models.adapters import add_adapters
from rapidformer.objectives import BoundObjective
from rapidformer.tasks.embedding.objective import EmbeddingObjective, ItemCollator, LossSettings
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.verification.trace import Trace
from tests.parity.harness import PADDED, TENSOR, UNPADDED, keep_rate, make_sgd, train, zero
from tests.parity.limits import LIMITS, check_equal
from tests.processes import run_in_kept_processes
from tests.small import make_tokenizer

ROWS, GLOBAL = 20, 12
"""A full update and a smaller one: in micro-batches of 3, ranks have 5 and 3 of its rows."""
FEW = 8
"""Of the smaller one alone: the first case of each number of processes has both."""
LORA = {"lora_rank": 2}
Case = tuple[str, dict[str, Any]]
CASES: dict[int, list[Case]] = {
    1: [(loss, {"micro_batch_size": 1}) for loss in ("infonce", "cosent", "triplet")],
    2: [
        ("infonce", {"micro_batch_size": 3, **UNPADDED}),
        ("cosent", {"micro_batch_size": 3, **zero(3)}),
        ("triplet", {"micro_batch_size": 3}),
        ("infonce", {TENSOR: 2, **UNPADDED}),
        ("infonce", {"context_parallel_size": 2}),
        ("infonce", {**LORA, **zero(3)}),
    ],
    4: [("cosent", {TENSOR: 2, **zero(2)})],
}


def build_model(dropout: float = 0.0) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def build_rows() -> list[dict[str, Any]]:
    """Two to four texts of two to nine tokens; the negatives differ in number."""
    generator = torch.Generator().manual_seed(1)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most, (), generator=generator))

    return [
        {
            "input_ids": [[draw(5, 50) for _ in range(draw(2, 10))] for _ in range(3 + number % 2)],
            "text_ids": [10 * number + place for place in range(3 + number % 2)],
            "scores": [number % 5 / 5],
        }
        for number in range(ROWS)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return ItemCollator({}, "right", texts=4, scores=1)(rows)


def build_objective(loss: str) -> EmbeddingObjective:
    return EmbeddingObjective(LossSettings(name=loss, margin=1.0), "mean", normalizes=True)


def run_case(loss: str, settings: dict[str, Any], rows: int) -> Trace:
    engine = RapidformerEngine(args={**PADDED, "global_batch_size": GLOBAL, **settings})
    loader = engine.data.build_loader(build_rows()[:rows], collate, shuffle=False, is_training=True)
    torch.manual_seed(2)
    built = add_adapters(build_model(), engine.args)
    model, *_ = engine.compose(built, make_sgd(built), keep_rate)

    def run_epoch(engine: RapidformerEngine, model: Any, loader: Any) -> None:
        forward = BoundObjective(build_objective(loss), model)
        for update in engine.data.iterate_updates(loader):
            engine.run_update(forward, update)
            engine.step()

    return train(engine, model, loader, run_epoch=run_epoch)


def run_cases(cases: list[Case]) -> list[Any]:
    torch.set_num_threads(1)
    return [*map(run_case, *zip(*cases, strict=True), count_rows(cases)), compare_with_dropout()]


def count_rows(cases: list[Case]) -> list[int]:
    return [ROWS, *[FEW] * (len(cases) - 1)]


@functools.cache
def run_whole(loss: str, rows: int, *, has_lora: bool) -> Trace:
    """Each update as one batch in one process: plain autograd, without a first pass."""
    return run_case(loss, {"micro_batch_size": GLOBAL, **(LORA if has_lora else {})}, rows)


@pytest.mark.parametrize("world_size", CASES)
def test_loss_and_gradients_do_not_depend_on_the_layout(world_size: int) -> None:
    cases = CASES[world_size]
    everyone = run_in_kept_processes(run_cases, world_size, cases)
    *columns, differences = zip(*everyone, strict=True)
    assert max(differences) < 2e-6, "with dropout"
    for (loss, settings), rows, traces in zip(cases, count_rows(cases), columns, strict=True):
        whole = run_whole(loss, rows, has_lora="lora_rank" in settings)
        check_equal(whole, list(traces), LIMITS, where=f"{loss} on {world_size} under {settings}")


def learn(folder: Path, **settings: Any) -> list[float]:
    """The losses of a task's run on 20 pairs of texts: updates of 6, 6, 6 and 2."""
    words = [f"w{number}" for number in range(20)]
    pairs = zip(words, words[1:] + words[:1], strict=True)
    rows = [{"query": f"{a} {b}", "positive": f"{b} w0 {a}"} for a, b in pairs]
    engine = RapidformerEngine(args={
        "task": "embedding", "pretrained_model_name_or_path": str(folder / "model"), "lr": 0.05,
        "optimizer": "sgd", "lr_decay_style": "constant", "micro_batch_size": 3, "epochs": 1,
        "global_batch_size": 6, "log_interval": 1, "progress": False, "log_level": "error",
        "save": str(folder / "run"), **settings,
    })  # fmt: skip
    finetuner = TaskFinetuner(engine, get_task("embedding"), {"train": rows})
    heard = Losses()
    finetuner.callbacks = [heard]
    try:
        finetuner.train()
    finally:
        engine.close(gives_back=False)
    return heard.values


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        if "loss" in line:
            self.values.append(line["loss"])


def resume_twice(folder: Path) -> list[float]:
    run = str(folder / "run")
    third = learn(folder, load=run, exit_interval=3)
    return third + learn(folder, load=run, **zero(3))


def test_a_run_resumes_on_another_layout(tmp_path: Path) -> None:
    """Two updates in one process, one in two, the last and smaller one sharded."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    build_model().save_pretrained(tmp_path / "model")
    whole = learn(tmp_path, save="none", micro_batch_size=6)
    first = learn(tmp_path, exit_interval=2)
    for rest in run_in_kept_processes(resume_twice, 2, tmp_path):
        assert len(set(whole)) == 4 and first + rest == pytest.approx(whole, abs=1e-6)


def compare_with_dropout() -> float:
    """How far the gradients are from a bare loop's that draws the same dropout masks."""
    settings = {"micro_batch_size": 1, "global_batch_size": 8}
    engine = RapidformerEngine(args={**PADDED, **settings})
    loader = engine.data.build_loader(build_rows(), collate, shuffle=False, is_training=True)
    model, *_ = engine.compose(build_model(0.3), None)
    model.train()
    update = next(engine.data.iterate_updates(loader))
    topology = engine.runtime.topology
    seed = 100 + topology.get_rank("data")
    torch.manual_seed(seed)
    engine.run_update(BoundObjective(build_objective("infonce"), model), update)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [sum_over_rows(g, topology) for g in run_bare(update, topology, seed)]
    scale = max(float(gradient.norm()) for gradient in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).norm()) for ours, theirs in pairs) / scale


def run_bare(update: Update, topology: Any, seed: int) -> list[Tensor]:
    """All graphs of this rank's rows at once; the other ranks' vectors are constants."""
    model = build_model(0.3).train()
    objective = build_objective("infonce")
    torch.manual_seed(seed)
    items = [objective.embed(model, each.batch) for each in update]
    mine = torch.cat([each.vectors for each in items])
    with torch.no_grad():
        everyone = gather_rows(mine.detach(), topology)
        is_present = gather_rows(torch.cat([each.is_present for each in items]), topology)
    start = topology.get_rank("data") * len(mine)
    vectors = torch.cat([everyone[:start], mine, everyone[start + len(mine) :]])
    documents = vectors[:, 1:].flatten(0, 1)
    scores = 20 * functional.normalize(vectors[:, 0], dim=-1) @ documents.T
    scores = scores.masked_fill(~is_present[:, 1:].flatten(), -torch.inf)
    right = torch.arange(len(vectors)) * 3
    functional.cross_entropy(scores, right).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]
