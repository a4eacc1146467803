"""Models and blocks that are replayed by themselves on a GPU: the same bits as without graphs.

With deterministic kernels: otherwise two runs without a graph already differ in the last bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidformer.accel.cuda_graph import forward_graphs, stacks
from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.forward_graphs import ForwardModel
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.accel.unpad.promises import reading_no_padding
from rapidformer.data.batch import move_to_device
from rapidformer.engine import RapidformerEngine
from rapidformer.overlay import list_layers
from tests.gpu.test_cuda_graph import Run, deterministic
from tests.training.test_cuda_graph import make_bert, make_gpt2, make_rows, make_texts
from tests.training.test_own_loop_graphs import (
    Loop,
    Step,
    compare_two_calls,
    evaluate_in_between,
    go_back_late,
    go_back_twice,
    make_batches,
    train_once,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
assert deterministic  # a fixture for all tests


class Counting(Run):
    """Counts and reads its loss in every step, which no graph can."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.losses: list[float] = []

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        self.losses.append(loss.item())
        return loss


def count(run: Run) -> int:
    graphs = run.engine.updates.graphs
    assert graphs is not None
    assert "self.losses" in str(graphs.problem)
    assert graphs.in_pieces is not None
    assert graphs.in_pieces.problem is None
    assert graphs.finishing.updates, "a graph of its own updates the weights"
    return graphs.in_pieces.count


@pytest.mark.parametrize(
    "more",
    [{}, {"global_batch_size": 8}, {"mixed_precision": None}, {"compile": True}],
    ids=["plain", "accumulated", "fp32", "compiled"],
)
def test_fixed_shapes(more: dict[str, Any]) -> None:
    off = Counting(make_gpt2(), make_texts(48), **more, cuda_graph="off")
    expected = off.run_and_list()
    on = Counting(make_gpt2(), make_texts(48), **more)
    assert on.run_and_list() == expected
    assert on.losses == off.losses
    assert count(on) == 1


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (train_once, {}), (train_once, {"compile": True}), (compare_two_calls, {}),
        (go_back_twice, {}), (evaluate_in_between, {}), (go_back_late, {"compile": True}),
    ],
)  # fmt: skip
def test_an_own_loop(step: Step, more: dict[str, Any]) -> None:
    """It keeps what the model returned with its graph until the next step."""
    more = {"mixed_precision": "bf16", **more}
    losses = []
    for mode in ("off", "auto"):
        loop = Loop(make_gpt2(), None, cuda_graph=mode, **more)
        torch.manual_seed(3)
        for batch in make_batches(make_texts(64)):
            step(loop, move_to_device(batch, loop.engine.device))
        losses.append(loop.losses)
    assert losses[0] == losses[1]
    assert isinstance(loop.pieces, BlockGraphs)
    assert loop.pieces.problem is None
    assert loop.pieces.count == 1


def test_an_own_loop_around_a_classifier() -> None:
    losses = []
    for mode in ("off", "auto"):
        loop = Loop(make_bert(0.0), None, cuda_graph=mode, mixed_precision="bf16")
        for batch in make_batches(make_rows(64)):
            train_once(loop, move_to_device(batch, loop.engine.device))
        losses.append(loop.losses)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert isinstance(loop.pieces, ModelGraphs)
    assert loop.pieces.count


class Twice(Counting):
    """Calls its model twice, so that blocks are replayed."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = (model(**batch).loss + model(**batch).loss) / 2
        self.losses.append(loss.item())
        return loss


@pytest.mark.parametrize(
    ("kind", "pieces"), [(Counting, ModelGraphs), (Twice, BlockGraphs)], ids=["model", "blocks"]
)
@pytest.mark.parametrize("more", [{}, {"global_batch_size": 8}], ids=["plain", "accumulated"])
def test_rows_of_different_lengths(
    kind: type[Counting], pieces: type, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, against the same steps without a graph; and against the padded model."""
    on = kind(make_bert(0.1), make_rows(96), **more)
    lines = on.run_and_list()
    assert on.engine.updates.graphs is not None
    assert isinstance(on.engine.updates.graphs.in_pieces, pieces)
    assert 1 < count(on) <= stacks.MOST_SIZES
    with monkeypatch.context() as patch:
        patch.setattr(stacks, "MOST_SIZES", 0)
        patch.setattr(ModelGraphs, "most_sizes", 0)
        never = kind(make_bert(0.1), make_rows(96), **more)
        assert never.run_and_list() == lines
        assert count(never) == 0
    off = kind(make_bert(0.0), make_rows(32), cuda_graph="off", **more).run_and_list()
    mine = [line["loss"] for line in kind(make_bert(0.0), make_rows(32), **more).run_and_list()]
    assert mine == pytest.approx([line["loss"] for line in off], rel=2e-2)


@torch.no_grad()
def test_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier is replayed whole in prediction, with the logits of the plain model."""
    built: list[ForwardModel] = []

    class Noted(ForwardModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            built.append(self)

    monkeypatch.setattr(forward_graphs, "ForwardModel", Noted)
    model, rows = make_bert(0.1).cuda().eval(), make_rows(64, longest=90)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    order = lengths.argsort()
    batches = []
    for some in order.view(-1, 8):
        width = int(lengths[some].max())
        ids = torch.zeros(8, width, dtype=torch.long)
        mask = (torch.arange(width) < lengths[some][:, None]).long()
        for number, row in enumerate(some.tolist()):
            ids[number, : lengths[row]] = torch.tensor(rows[row]["input_ids"])
        batches.append(
            move_to_device({"input_ids": ids, "attention_mask": mask}, torch.device("cuda"))
        )
    with torch.autocast("cuda", torch.bfloat16):
        expected = [model(**batch).logits for batch in batches]
        engine = RapidformerEngine(args={"mixed_precision": "bf16", "save": "none"})
        composed = engine.model.compose_for_evaluation(model)
        with reading_no_padding(), engine.model.evaluating():
            found = [composed(**batch).logits for _ in range(2) for batch in batches]
    assert len(built) == 1
    assert built[0].problem is None
    assert 1 <= built[0].count < len(batches)
    for mine, theirs in zip(found, expected * 2, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    engine.close()
    assert "replay" not in list_layers(composed)
