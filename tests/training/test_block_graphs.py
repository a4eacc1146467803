"""Blocks that are replayed one by one, without a GPU: a stand-in runs them again instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, OPTConfig, OPTForCausalLM
from transformers.utils import output_capturing

from rapidformer.accel.cuda_graph import block_graphs, stacks
from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs
from rapidformer.accel.cuda_graph.chains import Following
from rapidformer.accel.cuda_graph.filling import prove_filling
from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.accel.cuda_graph.snapshot import HostNumbers
from rapidformer.compat.torch_modules import get_compiled_call
from rapidformer.engine import RapidformerEngine
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from tests.training import test_cuda_graph as whole
from tests.training.test_cuda_graph import (
    Rows,
    make_bart,
    make_bert,
    make_gpt2,
    make_rows,
    make_texts,
)


class Again:
    """Runs a function again, and writes the tensors that it returns where the first ones are."""

    device, has_room = torch.device("cpu"), True
    is_16_bit = compiles = False

    def __init__(self) -> None:
        self.recorded = self.replayed = self.sizes = 0

    def warm_up(self, function: Callable[[], Any], *, forbids_reads: bool) -> Any:
        return function()

    def split(self) -> Again:
        """There is no memory that recordings share."""
        return self

    def close(self) -> None:
        """There is no memory to give back."""

    def record(self, function: Callable[[], list[torch.Tensor]]) -> Any:
        before = torch.get_rng_state()
        first = function()
        torch.set_rng_state(before)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for mine, theirs in zip(first, function(), strict=True):
                mine.data.copy_(theirs)

        return first, replay


def use_stand_in(engine: RapidformerEngine, model: Any, capture: Any) -> None:
    """Let an engine record with it."""
    prove_filling(model, engine.model.parallelized.plan, None)
    engine.updates.graphs = GraphedPasses(
        model, engine.model.parameters, capture,
        engine.updates.weights.count_labels,
        is_asked=False, work=None,
        topology=engine.runtime.topology, exchange=None,
        blocks=engine.model.parallelized.plan.get_blocks(model),
    )  # fmt: skip


class Counting(whole.Run):
    """Counts its steps in Python, which a replay would leave out."""

    def __init__(self, model: Any, rows: Rows, capture: Any, **settings: Any) -> None:
        super().__init__(model, rows, None, **settings)
        self._stand_in, self.steps = capture, 0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        return model(**batch).loss

    def compose(self) -> Any:
        model = super().compose()
        if self._stand_in is not None:
            use_stand_in(self.engine, model, self._stand_in)
        return model

    @property
    def in_pieces(self) -> ModelGraphs | BlockGraphs:
        graphs = self.engine.updates.graphs
        assert graphs is not None
        assert graphs.in_pieces is not None
        return graphs.in_pieces


class Penalised(Counting):
    """Differentiates a gradient, and back-propagates twice through one forward pass."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        ids = batch.pop("input_ids")
        inputs = model.get_input_embeddings()(ids)
        loss = model(inputs_embeds=inputs, **batch).loss
        (first,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum() + 0 * first.sum()


class Twice(Counting):
    """Calls the model twice in a step, and once without gradients."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        with torch.no_grad():
            kept = model(**batch).logits
        first, second = model(**batch), model(**batch)
        return first.loss + (first.logits - second.logits).square().mean() + 0 * kept.mean()


class Timid(BertForSequenceClassification):
    """Counts in its own code: around the blocks, that is no obstacle."""

    calls = 0

    def forward(self, **batch: Any) -> Any:
        self.calls += 1
        return super().forward(**batch)


def train(
    kind: type[Counting],
    model: Any,
    rows: Rows,
    capture: Any,
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> Counting:
    run = kind(model, rows, capture, **more)
    run.optimizer = optimizer
    run.train()
    return run


@pytest.mark.parametrize(
    ("kind", "more", "limit"),
    [
        (Counting, {"global_batch_size": 8, "mixed_precision": "bf16"}, 0.0),
        (Twice, {}, 0.0),
        (Penalised, {}, 1e-5),
    ],
)
def test_every_step_runs_the_users_code(
    kind: type[Counting],
    more: dict[str, Any],
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses, norms and weights, with dropout. Second derivatives add up in another order."""
    plain = train(kind, make_gpt2(), make_texts(24), None, **more)
    capture = Again()
    monkeypatch.setattr(Following, "recover", None)
    replayed = train(kind, make_gpt2(), make_texts(24), capture, **more)
    assert isinstance(replayed.in_pieces, BlockGraphs)
    assert replayed.in_pieces.problem is None
    assert capture.replayed > capture.recorded > 0
    assert replayed.steps == plain.steps == 6
    for mine, theirs in zip(replayed.values.lines, plain.values.lines, strict=True):
        assert mine == pytest.approx(theirs, rel=limit, abs=0.0)
    pairs = zip(replayed.engine.model.parameters, plain.engine.model.parameters, strict=True)
    assert all(torch.allclose(mine, theirs, limit, limit) for mine, theirs in pairs)


def test_rows_of_different_lengths(caplog: pytest.LogCaptureFixture) -> None:
    """Against the padded model; the counter of the model's own code does not disturb."""
    rows = make_rows(24, longest=60)
    plain = train(Counting, make_bert(0.0), rows, None, dynamic_shape="off")
    model = make_bert(0.0)
    model.__class__ = Timid
    with caplog.at_level("INFO"):
        replayed = train(Counting, model, rows, Again())
    assert 1 <= replayed.in_pieces.count <= 4
    assert model.calls >= 6
    assert "2 blocks are replayed as CUDA graphs from step" in caplog.text
    assert "test_block_graphs.py" in caplog.text.partition("not the whole step: ")[2][:200]
    for mine, theirs in zip(replayed.values.lines, plain.values.lines, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    replayed.engine.close()
    assert all(get_compiled_call(block) is None for block in model.modules())


def test_sizes_that_are_not_rounded_are_recorded_while_replays_pay_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight lengths take turns three times: four are recorded when they come back."""
    texts = [[5 + (row + i) % 50 for i in range(10 + row // 4 % 8)] for row in range(96)]
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    captures = []
    for replays in (25, 1):
        monkeypatch.setattr(stacks, "_REPLAYS", replays)
        captures.append(Again())
        run = train(Counting, make_gpt2(32), rows, captures[-1], dynamic_shape="off")
        captures[-1].sizes = run.in_pieces.count
    assert captures[0].sizes == 4 < captures[1].sizes
    assert captures[0].recorded < captures[1].recorded


def test_an_encoder_is_replayed_whatever_size_its_decoder_has() -> None:
    """One length of inputs, ten of answers: only the encoder's blocks are recorded at first."""
    torch.manual_seed(1)
    inputs, answers = torch.randint(5, 60, (40, 12)).tolist(), torch.randint(5, 60, (40, 15))
    rows = [
        {"input_ids": ids, "labels": answers[row, : 6 + row // 4].tolist()}
        for row, ids in enumerate(inputs)
    ]
    plain = train(Counting, make_bart(0.1), rows, None, dynamic_shape="off")
    replayed = train(Counting, make_bart(0.1), rows, Again(), dynamic_shape="off")
    encoder, decoder = dict.fromkeys(replayed.in_pieces._stacks.values())
    assert (encoder.count, decoder.count) == (1, 0)
    assert replayed.in_pieces.problem is None
    assert replayed.values.lines == plain.values.lines
    again = train(Counting, make_bart(0.1), rows * 3, Again(), dynamic_shape="off")
    encoder, decoder = dict.fromkeys(again.in_pieces._stacks.values())
    assert encoder.count == 1 and decoder.count > 2
    longer = train(Counting, make_bart(0.1), rows * 3, None, dynamic_shape="off")
    assert again.values.lines == longer.values.lines


def test_compiled_blocks_are_the_models_own_again_after_close() -> None:
    model = make_gpt2()
    run = train(Twice, model, make_texts(24), Again(), compile=True, compile_backend="eager")
    assert isinstance(run.in_pieces, BlockGraphs)
    run.engine.close()
    assert all(get_compiled_call(block) is None for block in model.modules())


class Changed(Counting):
    """Calls its second block with another tensor, once, and reads hidden states later."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        block = model.transformer.h[1]
        if self.steps == 5:
            model.transformer.h[1] = Doubled(block)
        outputs = model(**batch, output_hidden_states=self.steps == 7)
        model.transformer.h[1] = block
        read = [each.square().mean() for each in outputs.hidden_states or ()]
        return outputs.loss + sum(read)


class Reading(Counting):
    """Reads what every block returns, in every step."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        outputs = model(**batch, output_hidden_states=True)
        return outputs.loss + sum(each.square().mean() for each in outputs.hidden_states)


class Doubled(torch.nn.Module):
    """Calls a block with twice its input."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return self.block(2 * hidden, *args, **kwargs)


def test_blocks_that_are_called_in_another_way() -> None:
    plain = train(Changed, make_gpt2(), make_texts(32), None)
    capture = Again()
    replayed = train(Changed, make_gpt2(), make_texts(32), capture)
    assert replayed.in_pieces.problem is None
    assert capture.recorded == 2, "both blocks together: a forward and a backward pass"
    assert replayed.values.lines == plain.values.lines


def test_blocks_that_are_skipped_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerDrop: the last block of a chain might be the one that is skipped."""
    monkeypatch.setattr(block_graphs, "HostNumbers", lambda **_: HostNumbers(has_device=True))
    config = OPTConfig(
        vocab_size=60, hidden_size=16, ffn_dim=16, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=16, dropout=0.0, layerdrop=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    plain = train(Counting, copy.deepcopy(model), make_texts(40), None)
    capture = Again()
    replayed = train(Counting, model, make_texts(40), capture)
    assert replayed.in_pieces.problem is None
    assert capture.recorded > 2, "each block by itself"
    assert capture.replayed > capture.recorded
    assert replayed.values.lines == plain.values.lines


class Silent(Again):
    """A replay that runs no hooks: a graph has no Python code."""

    def record(self, function: Callable[[], list[torch.Tensor]]) -> Any:
        first, replay = super().record(function)

        def replay_silently() -> None:
            token = output_capturing._active_collector.set(None)
            replay()
            output_capturing._active_collector.reset(token)

        return first, replay_silently


def test_outputs_of_blocks_that_the_model_is_asked_for() -> None:
    """transformers keeps them by hooks, which run after each replay."""
    plain = train(Reading, make_gpt2(), make_texts(24), None)
    capture = Silent()
    replayed = train(Reading, make_gpt2(), make_texts(24), capture)
    assert replayed.in_pieces.problem is None
    assert capture.recorded == 4, "each block by itself"
    assert capture.replayed > capture.recorded
    assert replayed.values.lines == plain.values.lines


class Baked(Again):
    """A replay drops values as it did when it was recorded, as a graph does."""

    def __init__(self, dropout: torch.nn.Dropout) -> None:
        super().__init__()
        self._state = vars(dropout)

    def record(self, function: Callable[[], list[torch.Tensor]]) -> Any:
        (first, replay), recorded = super().record(function), dict(self._state)

        def replay_as_recorded() -> None:
            now = dict(self._state)
            self._state.update(recorded)
            replay()
            self._state.update(now)

        return first, replay_as_recorded


class TwoModes(Counting):
    """Calls its model a second time as in evaluation, but with gradients."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        first = model(**batch)
        second = model.eval()(**batch)
        model.train()
        return first.loss + (first.logits - second.logits).square().mean()


class Toggling(Callback):
    """Another rate for one step: that in which the calls of the step before it are recorded."""

    def __init__(self, dropout: torch.nn.Dropout) -> None:
        self._dropout = dropout

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        self._dropout.p = 0.5 if loop.step == 3 else 0.1


@pytest.mark.parametrize("kind", [Counting, TwoModes])
def test_what_changes_before_calls_are_recorded_is_seen(kind: type[Counting]) -> None:
    runs = []
    for is_replayed in (False, True):
        model = make_gpt2()
        dropout = model.transformer.h[1].mlp.dropout
        run = kind(model, make_texts(40), Baked(dropout) if is_replayed else None)
        run.callbacks = [run.values, *([Toggling(dropout)] if kind is Counting else [])]
        run.train()
        runs.append(run)
    assert runs[1].in_pieces.problem is None
    assert runs[1].in_pieces.count
    assert runs[1].values.lines == runs[0].values.lines


class Stale(Again):
    """A replay that does not see its inputs."""

    def record(self, function: Callable[[], list[torch.Tensor]]) -> Any:
        first, _ = super().record(function)
        return first, function


def test_what_cannot_be_replayed_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    plain = train(Counting, make_gpt2(), make_texts(16), None)
    stale = train(Counting, make_gpt2(), make_texts(16), Stale())
    assert "a replay gave other outputs" in str(stale.in_pieces.problem)
    assert stale.values.lines == plain.values.lines

    def look(module: Any, args: Any, output: Any) -> None:
        seen.append(output)

    seen: list[Any] = []
    model = make_gpt2()
    model.transformer.h[1].mlp.register_forward_hook(look)
    hooked = train(Counting, model, make_texts(16), Again())
    assert "hooks on 1.mlp" in str(hooked.in_pieces.problem)
    assert hooked.values.lines == plain.values.lines
    assert len(seen) >= 4


def test_a_weight_that_has_replaced_another_may_be_moved_later() -> None:
    class Moving(Counting):
        def run_forward_step(self, batch: Any, model: Any) -> Any:
            layer = model.transformer.h[0].mlp.c_fc
            if self.steps == 2:
                layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
            if self.steps == 5:
                layer.weight.data = 2 * layer.weight.data
            return super().run_forward_step(batch, model)

    gradients = []
    for capture in (None, Again()):
        model = make_gpt2()
        train(Moving, model, make_texts(48), capture)
        gradients.append(model.transformer.h[0].mlp.c_fc.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
