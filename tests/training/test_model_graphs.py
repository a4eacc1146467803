"""Models that are replayed inside a user's step, without a GPU: a stand-in runs them again."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import BertForSequenceClassification, BertForTokenClassification

from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.overlay import list_layers
from rapidformer.training.callbacks import Callback
from tests.training.test_block_graphs import Again, Counting, Stale, Twice, train
from tests.training.test_cuda_graph import (
    Recordable,
    Rows,
    make_bert,
    make_gpt2,
    make_rows,
    make_texts,
)


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


class TwoHeads(BertForSequenceClassification):
    """Returns the answers of two heads, and can be given tensors in a list."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.second = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids: Any, attention_mask: Any, more: Any = (), **_: Any) -> Any:
        pooled = self.bert(input_ids, attention_mask)[1]
        for tensor in more:
            pooled = pooled + tensor
        return {"first": self.classifier(pooled), "second": self.second(pooled)}


class Heads(Counting):
    """Trains one of two heads."""

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        return {}


class Alternating(Heads):
    """Trains one head, then the other: the optimizer must leave the unused one alone."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        labels = batch.pop("labels")
        outputs = model(**batch)
        name = "first" if self.steps % 4 < 2 else "second"
        return functional.cross_entropy(outputs[name], labels)


class Prompted(Heads):
    """Passes a tensor with a gradient in a list."""

    prompt: Any = None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        if self.prompt is None:
            self.prompt = torch.ones(model.config.hidden_size, requires_grad=True)
        labels = batch.pop("labels")
        loss = functional.cross_entropy(model(**batch, more=[self.prompt])["first"], labels)
        loss.backward(retain_graph=True, inputs=[self.prompt])
        return loss + 0 * model.second.weight.sum()


class Marking(BertForSequenceClassification):
    """Leaves labels out, in its batch."""

    def forward(self, input_ids: Any, labels: Any, **more: Any) -> Any:
        labels[:1] = -100
        return super().forward(input_ids=input_ids, labels=labels, **more)


class Marked(Counting):
    """Counts the labels that its model left out."""

    left_out = 0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        loss = model(**batch).loss
        self.left_out += int((batch["labels"] == -100).sum())
        return loss


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


class Unhurried(Counting):
    """Hears of every update before it is made."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.callbacks = [*self.callbacks, Hearing()]


class Hearing(Callback):
    def on_pre_optimizer_step(self, *_: Any) -> None:
        """A user may look at gradients here."""


@pytest.mark.parametrize(
    ("kind", "make", "more"),
    [
        (Counting, make_bert, {}),
        (Counting, make_bert, {"global_batch_size": 8}),
        (Counting, make_gpt2, {}),
        (Unfreezing, make_bert, {}),
        (Unhurried, make_bert, {}),
    ],
)
def test_the_update_after_them_is_replayed(
    kind: type[Counting], make: Any, more: dict[str, Any]
) -> None:
    """Losses, norms and weights of the same passes with an update without a graph, bit by bit."""
    is_bert = make is make_bert
    rows = make_rows(32, longest=20) if is_bert else make_texts(32)
    runs = []
    for optimizer_class in (Recordable, MultiTensorAdamW):
        model = make_bert(0.1) if is_bert else make_gpt2()
        optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1)
        # Clipping divides here and multiplies there.
        runs.append(train(kind, model, rows, Again(), optimizer, clip_grad=1e9, **more))
    replayed, plain = runs
    graphs = replayed.engine.updates.graphs
    assert graphs is not None and replayed.in_pieces.count > 0
    assert graphs.finishing.updates == (kind is not Unhurried)
    updates = 0 if kind is Unhurried else len(replayed.values.lines)
    assert isinstance(replayed.optimizer, Recordable)
    assert replayed.optimizer.launches == updates
    assert all(parameter.grad is None for parameter in replayed.engine.model.parameters)
    check_same(replayed, plain, 0.0)


def make_heads() -> TwoHeads:
    torch.manual_seed(0)
    return TwoHeads(make_bert(0.0).config)


@pytest.mark.parametrize("is_recordable", [False, True])
def test_an_output_that_is_not_used_has_no_gradient(is_recordable: bool) -> None:
    """So the optimizer leaves its weights alone, also in a graph."""
    rows = [{**row, "input_ids": (20 * row["input_ids"])[:20]} for row in make_rows(48)]
    more = {"weight_decay": 0.1}
    plain = train(Alternating, make_heads(), rows, None, dynamic_shape="off", **more)
    heads = make_heads()
    decayed = [p for p in heads.parameters() if p.dim() > 1]
    others = [p for p in heads.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    recordable = Recordable(groups, lr=1e-2, weight_decay=0.1) if is_recordable else None
    replayed = train(Alternating, heads, rows, Again(), recordable, **more)
    assert isinstance(replayed.in_pieces, ModelGraphs)
    assert replayed.in_pieces.count > 0
    check_same(replayed, plain, 1e-4)


def test_gradients_of_tensors_in_lists_are_kept() -> None:
    rows = make_rows(24, longest=60)
    plain = train(Prompted, make_heads(), rows, None)
    replayed = train(Prompted, make_heads(), rows, Again())
    assert torch.allclose(replayed.prompt.grad, plain.prompt.grad, 1e-4)
    check_same(replayed, plain, 1e-4)


def test_a_model_that_changes_its_batch_runs_as_it_is() -> None:
    rows = make_rows(24, longest=60)
    runs = []
    for capture in (None, Again()):
        torch.manual_seed(0)
        runs.append(train(Marked, Marking(make_bert(0.0).config), rows, capture))
    assert runs[0].left_out == runs[1].left_out == runs[0].steps
    check_same(runs[1], runs[0], 1e-4)


@pytest.mark.parametrize("make", [make_bert, make_gpt2])
def test_hooks_on_parameters_run_once(make: Any) -> None:
    rows = make_rows(24, longest=60) if make is make_bert else make_texts(24)
    runs, seen = [], list[int]()
    for capture in (None, Again()):
        model = make(0.0) if make is make_bert else make()
        weight = next(p for name, p in model.named_parameters() if name.endswith("weight"))
        weight.register_hook(lambda gradient: seen.append(1) or 0.5 * gradient)
        runs.append(train(Counting, model, rows, capture))
        assert len(seen) == runs[-1].steps
        seen.clear()
    check_same(runs[1], runs[0], 1e-4)


def test_a_resumed_run_draws_the_same_numbers(tmp_path: Any) -> None:
    """With dropout: sizes do not depend on when a run began."""
    rows, more = make_rows(32, longest=60), {"save_interval": 4, "no_save_optim": False}
    whole = train(Counting, make_bert(0.1), rows, Again(), save=str(tmp_path / "a"), **more)
    first = train(
        Counting, make_bert(0.1), rows, Again(), save=str(tmp_path / "b"), exit_interval=4, **more
    )
    assert first.steps == 4
    second = train(
        Counting, make_bert(0.1), rows, Again(), save=str(tmp_path / "b"), resume="auto", **more
    )
    assert second.steps == 4
    assert second.values.lines == whole.values.lines[4:]


def test_replaced_weights_are_noticed() -> None:
    rows = make_rows(48, longest=20)

    class Replacing(Counting):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            if self.steps == 6:
                model.classifier.weight = torch.nn.Parameter(torch.zeros(2, 32))
            return super().run_forward_step(batch, model)

    capture = Again()
    replayed = train(Replacing, make_bert(0.0), rows, capture)
    assert isinstance(replayed.in_pieces, ModelGraphs)
    assert capture.recorded > 2 * replayed.in_pieces.count


def test_a_weight_that_is_replaced_in_the_same_memory_gets_the_gradient() -> None:
    class Sharing(Counting):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            if self.steps == 6:
                model.classifier.weight = torch.nn.Parameter(model.classifier.weight.data)
            return super().run_forward_step(batch, model)

    gradients = []
    for capture in (None, Again()):
        model = make_bert(0.0)
        train(Sharing, model, make_rows(48, longest=20), capture)
        gradients.append(model.classifier.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_copy_of_the_model_keeps_nothing_alive() -> None:
    replayed = train(Copied, make_bert(0.0), make_rows(24, longest=60), Again())
    graphs = weakref.ref(replayed.in_pieces)
    replayed.engine.close()
    kept = replayed.copy
    del replayed
    gc.collect()
    assert graphs() is None
    assert kept(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 2)
