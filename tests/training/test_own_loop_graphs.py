"""Models that are replayed in a script's own loop, without a GPU: a stand-in runs them again."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from rapidformer import RapidformerEngine
from rapidformer.accel.cuda_graph import graphs as whole_steps
from rapidformer.accel.cuda_graph import recorded_block
from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.data.collate import PadCollator
from rapidformer.models.work import ModelWork
from rapidformer.overlay import list_layers
from tests.training.test_block_graphs import Again, Silent, use_stand_in
from tests.training.test_cuda_graph import make_bert, make_gpt2, make_rows, make_texts

Step = Callable[["Loop", Any], None]


class Loop:
    """Five lines of a user's own."""

    def __init__(self, model: Any, capture: Any, **settings: Any) -> None:
        self.engine = RapidformerEngine(args={"micro_batch_size": 4, **settings})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, _ = self.engine.compose(model, optimizer)
        self.model.train()
        if capture is not None:
            use_stand_in(self.engine, self.model, capture)
        self.losses: list[float] = []
        self.kept: list[Any] = []

    def update(self, loss: Any) -> None:
        self.engine.backward(loss)
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def pieces(self) -> ModelGraphs | BlockGraphs:
        graphs = self.engine.updates.graphs
        assert graphs is not None
        assert graphs.in_pieces is not None
        return graphs.in_pieces


def train_once(loop: Loop, batch: Any) -> None:
    """All that the model returns is kept until the next step, as in most scripts."""
    loop.kept = [loop.model(**batch)]
    loop.update(loop.kept[0].loss)


def compare_two_calls(loop: Loop, batch: Any) -> None:
    first, second = loop.model(**batch), loop.model(**batch)
    loop.update(first.loss + (first.logits - second.logits).square().mean())


def go_back_twice(loop: Loop, batch: Any) -> None:
    """A gradient of one part of the loss first, then of all."""
    outputs = loop.model(**batch)
    weight = loop.model.get_output_embeddings()
    head = next((weight if weight is not None else loop.model.classifier).parameters())
    (slope,) = torch.autograd.grad(outputs.loss, head, retain_graph=True)
    loop.update(outputs.loss * slope.norm().detach())


def evaluate_in_between(loop: Loop, batch: Any) -> None:
    """With gradients, in either mode: nobody has said no_grad()."""
    train_once(loop, batch)
    for is_training in (False, True):
        loop.model.train(is_training)
        loop.losses += [loop.model(**batch).loss.item() for _ in range(12)]


def go_back_late(loop: Loop, batch: Any) -> None:
    """The loss of one step is used in the next."""
    loop.kept.append(loop.model(**batch).loss)
    if len(loop.kept) == 2:
        loop.update(sum(loop.kept))
        loop.kept = []


def make_batches(rows: list[dict[str, Any]]) -> Iterator[Any]:
    collate = PadCollator()
    for start in range(0, len(rows), 4):
        yield collate(rows[start : start + 4])


def run(step: Step, model: Any, rows: list[Any], capture: Any, **settings: Any) -> Loop:
    loop = Loop(model, capture, **settings)
    torch.manual_seed(3)
    for batch in make_batches(rows):
        step(loop, batch)
    return loop


def assert_same(mine: Loop, theirs: Loop, limit: float = 0.0) -> None:
    assert mine.losses == pytest.approx(theirs.losses, rel=limit, abs=0.0)
    pairs = zip(mine.model.parameters(), theirs.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, limit, limit) for a, b in pairs)


@pytest.mark.parametrize(
    "step", [train_once, compare_two_calls, go_back_twice, evaluate_in_between, go_back_late]
)
def test_an_own_loop_is_replayed(step: Step) -> None:
    """Losses and weights with dropout, bit by bit."""
    plain = run(step, make_gpt2(), make_texts(64), None)
    capture = Again()
    replayed = run(step, make_gpt2(), make_texts(64), capture)
    assert isinstance(replayed.pieces, BlockGraphs)
    assert replayed.pieces.problem is None
    assert capture.replayed > capture.recorded > 0
    assert_same(replayed, plain)


def test_a_classifier_is_replayed_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    plain = run(train_once, make_bert(0.0), make_rows(32, longest=60), None, dynamic_shape="off")
    with caplog.at_level("INFO"):
        replayed = run(train_once, make_bert(0.0), make_rows(32, longest=60), Again())
    assert isinstance(replayed.pieces, ModelGraphs)
    assert replayed.pieces.count
    assert "graphs    the model's passes are replayed as CUDA graphs from now on" in caplog.text
    assert_same(replayed, plain, 1e-4)


def test_a_script_goes_on_after_a_call_that_failed() -> None:
    """As after running out of memory: the model is still replayed as a whole."""

    def fail_once(loop: Loop, batch: Any) -> None:
        train_once(loop, batch)
        if len(loop.losses) > 2:
            with pytest.raises(IndexError):
                loop.model(**{**batch, "input_ids": batch["input_ids"] + 1000})
        train_once(loop, batch)

    rows = make_rows(16, longest=60)
    plain = run(fail_once, make_bert(0.0), rows, None, dynamic_shape="off")
    replayed = run(fail_once, make_bert(0.0), rows, Again())
    assert isinstance(replayed.pieces, ModelGraphs)
    assert replayed.pieces.count
    assert_same(replayed, plain, 5e-4)  # key biases: their gradients are rounding


def test_updates_of_several_micro_batches() -> None:
    more = {"gradient_accumulation_steps": 2}
    plain = run(train_once, make_gpt2(), make_texts(32), None, **more)
    capture = Again()
    assert_same(run(train_once, make_gpt2(), make_texts(32), capture, **more), plain)
    assert capture.replayed


def test_a_copy_is_not_replayed_and_closing_takes_everything_off() -> None:
    plain = type(make_gpt2())
    loop = run(train_once, make_gpt2(), make_texts(16), Again())
    assert "passes" in list_layers(loop.model)
    batch = next(make_batches(make_texts(4)))
    twin, calls = copy.deepcopy(loop.model), loop.pieces.calls.copy()
    twin(**batch).loss.backward()
    assert loop.pieces.calls == calls
    loop.engine.close()
    assert type(loop.model) is plain


def test_long_steps_are_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_steps, "_MOST_WORK", 1.0)
    capture = Again()
    loop = Loop(make_gpt2(), capture)
    assert loop.engine.updates.graphs is not None
    loop.engine.updates.graphs._work = ModelWork(per_token=1.0)
    with caplog.at_level("INFO"):
        for batch in make_batches(make_texts(16)):
            train_once(loop, batch)
    assert not capture.recorded
    assert "passes are not replayed as CUDA graphs: its steps are long" in caplog.text


def test_a_parameter_that_a_module_keeps_elsewhere_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recording would have no gradient of it."""
    plain = run(train_once, make_gpt2(), make_texts(32), None)
    monkeypatch.setattr(recorded_block._StandIns, "in_place", lambda self: nullcontext())
    replayed = run(train_once, make_gpt2(), make_texts(32), Again())
    assert_same(replayed, plain)
    assert replayed.pieces.problem == "a module keeps a parameter where torch does not look"


def checkpoint_blocks(loop: Loop, batch: Any) -> None:
    """From the fourth step on, blocks run again in the backward pass."""
    if len(loop.losses) == 3:
        loop.model.gradient_checkpointing_enable({"use_reentrant": False})
    train_once(loop, batch)


def checkpoint_the_call(loop: Loop, batch: Any) -> None:
    """All of the forward pass runs again."""

    def compute(ids: Any) -> Any:
        return loop.model(**{**batch, "input_ids": ids}).loss

    loop.update(checkpoint(compute, batch["input_ids"], use_reentrant=False))


@pytest.mark.parametrize("step", [checkpoint_blocks, checkpoint_the_call])
@pytest.mark.parametrize("make", [make_gpt2, functools.partial(make_bert, 0.0)])
def test_a_script_that_recomputes_is_left_alone(step: Step, make: Callable[[], Any]) -> None:
    """A checkpoint compares what the two runs of a block have saved."""
    texts = make_texts(32)
    if make is not make_gpt2:
        texts = [{"input_ids": text["input_ids"], "labels": n % 2} for n, text in enumerate(texts)]
    plain = run(step, make(), texts, None)
    assert_same(run(step, make(), texts, Again()), plain)


def compute_weights_once(loop: Loop, batch: Any) -> None:
    with parametrize.cached():
        loop.update(sum(loop.model(**batch).loss for _ in range(2)))


def test_weights_that_are_computed_once_for_several_calls() -> None:
    def build() -> Any:
        model = make_gpt2()
        for block in model.transformer.h:
            parametrizations.weight_norm(block.mlp.c_fc)
        return model

    plain = run(compute_weights_once, build(), make_texts(32), None)
    assert_same(run(compute_weights_once, build(), make_texts(32), Again()), plain)


def change_between_calls(loop: Loop, batch: Any) -> None:
    """From the fifth step on: other weights, hidden states, or fewer blocks, in the second call."""
    outputs, number = loop.model(**batch), len(loop.losses)
    body, kept = loop.model.transformer, [p.data for p in loop.model.parameters()]
    blocks, more = body.h, {}
    if number % 4 == 1 and number > 4:
        for parameter in loop.model.parameters():
            parameter.data = 1.1 * parameter.data
    elif number % 4 == 2:
        more["output_hidden_states"] = True
    elif number % 4 == 3:
        body.h = blocks[:1]
    again = loop.model(**batch, **more)
    body.h = blocks
    for parameter, data in zip(loop.model.parameters(), kept, strict=True):
        parameter.data = data
    read = [each.square().mean() for each in again.hidden_states or ()]
    loop.update(outputs.loss + again.loss.detach() + sum(read))


def test_what_changes_between_two_calls_of_the_model_is_seen() -> None:
    plain = run(change_between_calls, make_gpt2(), make_texts(64), None)
    capture = Silent()
    replayed = run(change_between_calls, make_gpt2(), make_texts(64), capture)
    assert_same(replayed, plain)
    assert replayed.pieces.problem is None
    assert capture.replayed > capture.recorded


def call_compiled(loop: Loop, batch: Any) -> None:
    """The script compiles the model that compose() has returned."""
    if not loop.kept:
        loop.kept.append(torch.compile(loop.model, backend="eager"))
    loop.update(loop.kept[0](**batch).loss)


def test_a_model_that_the_script_compiles() -> None:
    plain = run(train_once, make_gpt2(dropout=0.0), make_texts(12), None)
    assert_same(run(call_compiled, make_gpt2(dropout=0.0), make_texts(12), Again()), plain)


def test_weights_that_change_before_the_backward_pass_are_refused() -> None:
    """As torch does, and before a replay, which would read the new ones."""
    capture = Again()
    loop = run(train_once, make_gpt2(), make_texts(24), capture)
    loss = loop.model(**next(make_batches(make_texts(4)))).loss
    replayed = capture.replayed
    with torch.no_grad():
        loop.model.transformer.h[1].mlp.c_fc.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loop.engine.backward(loss)
    assert capture.replayed == replayed


def test_a_model_does_not_keep_the_graphs_of_an_engine_that_is_gone() -> None:
    """``Accelerator.free_memory`` closes nothing."""
    loop = run(train_once, make_gpt2(), make_texts(16), Again())
    pieces, model = weakref.ref(loop.pieces), loop.model
    del loop
    gc.collect()
    assert pieces() is None
    model(**next(make_batches(make_texts(4)))).loss.backward()


def test_a_call_that_was_replayed_before_passes_were_given_up() -> None:
    """Recordings of blocks may have overwritten since what its backward pass needs."""
    capture, rows = Again(), make_rows(32, longest=60)
    loop = run(train_once, make_bert(0.0), rows, capture)
    assert loop.pieces.count
    batch, before = next(make_batches(rows[:4])), capture.replayed
    loss = loop.model(**batch).loss
    assert capture.replayed > before
    loop.model(**batch)
    assert isinstance(loop.pieces, BlockGraphs)
    before = capture.replayed
    loss.backward()
    assert capture.replayed == before
