"""Models that are replayed inside a user's step, without a GPU: a stand-in runs them again."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BertForSequenceClassification, BertForTokenClassification

from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.overlay import list_layers
from tests.training.test_block_graphs import Again, Counting, Stale, Twice, train
from tests.training.test_cuda_graph import Rows, make_bert, make_rows


class OwnLoss(Counting):
    """Has a loss of its own, and counts right answers."""

    right = 0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        logits = model(**batch).logits
        self.right += int((logits.argmax(-1) == batch["labels"]).sum())
        return functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1)


class Penalised(Counting):
    """Differentiates a gradient."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        loss = model(**batch).loss
        (slope,) = torch.autograd.grad(loss, model.classifier.weight, create_graph=True)
        return loss + slope.square().sum()


class Delayed(Counting):
    """Back-propagates through two forward passes at the end of every update."""

    before: Any = None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        loss = model(**batch).loss
        if self.before is None:
            self.before = loss
            return 0 * model.classifier.weight.sum()
        before, self.before = self.before, None
        return loss + before


class Inner(Counting):
    """Calls a part of its model only."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        labels = batch.pop("labels")
        return functional.cross_entropy(model.classifier(model.bert(**batch)[1]), labels)


class Copied(Counting):
    """Keeps a copy of its model from an early step, and asks it, too."""

    copy: Any = None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        if self.steps == 4:
            self.copy = copy.deepcopy(model)
        loss = model(**batch).loss
        return loss if self.copy is None else loss + self.copy(**batch).loss.detach()


class Unfreezing(Counting):
    """Trains the first block from the fifth micro-batch on."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        model.bert.encoder.layer[0].requires_grad_(self.steps > 4)
        return model(**batch).loss


class Embedded(Counting):
    """Looks its embeddings up by itself."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        ids = batch.pop("input_ids")
        return model(inputs_embeds=model.get_input_embeddings()(ids), **batch).loss


def check_same(mine: Counting, theirs: Counting, limit: float) -> None:
    assert mine.steps == theirs.steps > 0
    for one, other in zip(mine.values.lines, theirs.values.lines, strict=True):
        assert one == pytest.approx(other, rel=limit, abs=0.0)
    pairs = zip(mine.engine.model.parameters, theirs.engine.model.parameters, strict=True)
    assert all(torch.allclose(a, b, 10 * limit, limit) for a, b in pairs)


@pytest.mark.parametrize("kind", [Counting, OwnLoss, Penalised, Copied, Unfreezing])
def test_rows_of_different_lengths(kind: type[Counting], caplog: pytest.LogCaptureFixture) -> None:
    """Against the padded model, accumulated."""
    rows, more = make_rows(32, longest=60), {"global_batch_size": 8}
    plain = train(kind, make_bert(0.0), rows, None, dynamic_shape="off", **more)
    model, capture = make_bert(0.0), Again()
    signature = inspect.signature(model.forward)
    with caplog.at_level("INFO"):
        replayed = train(kind, model, rows, capture, **more)
    assert isinstance(replayed.in_pieces, ModelGraphs)
    assert replayed.in_pieces.problem is None
    times = 2 if kind is Unfreezing else 1  # with other parameters
    expected = 2 * times * replayed.in_pieces.count
    assert capture.recorded == expected > 0, "a forward and a backward pass"
    assert capture.replayed > 3 * replayed.in_pieces.count
    assert "the model's passes are replayed as CUDA graphs from step" in caplog.text
    assert inspect.signature(model.forward) == signature
    check_same(replayed, plain, 1e-4)
    replayed.engine.close()
    assert "replay" not in list_layers(model)


@pytest.mark.parametrize("kind", [Counting, Delayed])
def test_results_do_not_depend_on_what_is_replayed(
    kind: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, bit by bit."""
    rows, more = make_rows(32, longest=60), {"global_batch_size": 8}
    capture = Again()
    replayed = train(kind, make_bert(0.1), rows, capture, **more)
    assert capture.recorded > 0
    monkeypatch.setattr(ModelGraphs, "most_sizes", 0)
    never = Again()
    check_same(train(kind, make_bert(0.1), rows, never, **more), replayed, 0.0)
    assert never.recorded == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Twice, "more than once"), (Embedded, "have gradients"), (Inner, "does not call it")],
)
def test_blocks_are_replayed_instead(
    kind: type[Counting], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    give_up = ModelGraphs.give_up

    def note(self: ModelGraphs, problem: str) -> None:
        problems.append(problem)
        give_up(self, problem)

    monkeypatch.setattr(ModelGraphs, "give_up", note)
    rows = make_rows(24, longest=60)
    plain = train(kind, make_bert(0.0), rows, None, dynamic_shape="off")
    model = make_bert(0.0)
    replayed = train(kind, model, rows, Again())
    assert isinstance(replayed.in_pieces, BlockGraphs)
    assert replayed.in_pieces.count > 0 or kind is Inner  # each of its batches has another width
    assert reason in problems[0]
    assert "replay" not in list_layers(model)
    check_same(replayed, plain, 1e-4)


def label_tokens(rows: Rows) -> Rows:
    return [{**row, "labels": [number % 2 for number in row["input_ids"]]} for row in rows]


def test_outputs_for_each_token_leave_it_to_the_blocks() -> None:
    rows = label_tokens(make_rows(16, longest=30))
    config = make_bert(0.0).config
    torch.manual_seed(0)
    weights = BertForTokenClassification(config).state_dict()
    runs = []
    for capture in (None, Again()):
        model = BertForTokenClassification(config)
        model.load_state_dict(weights)
        runs.append(train(Counting, model, rows, capture))
    assert isinstance(runs[1].in_pieces, BlockGraphs)
    check_same(runs[1], runs[0], 1e-4)


def test_a_replay_that_does_not_see_its_inputs_is_not_used() -> None:
    rows = make_rows(24, longest=60)
    plain = train(Counting, make_bert(0.0), rows, None, dynamic_shape="off")
    stale = train(Counting, make_bert(0.0), rows, Stale())
    assert isinstance(stale.in_pieces, BlockGraphs)
    assert "gave other outputs" in str(stale.in_pieces.problem)
    check_same(stale, plain, 1e-4)


def test_hooks_inside_the_model_run_in_every_step() -> None:
    seen: list[int] = []
    rows, model = make_rows(24, longest=60), make_bert(0.0)
    assert isinstance(model, BertForSequenceClassification)
    model.bert.pooler.register_forward_hook(lambda *_: seen.append(1))
    replayed = train(Counting, model, rows, Again())
    assert isinstance(replayed.in_pieces, BlockGraphs)
    assert len(seen) >= replayed.steps
