"""``--cuda-graph`` without a GPU: a stand-in for CUDA graphs runs the passes again instead."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.accel.cuda_graph import graphs, inputs
from rapidformer.accel.cuda_graph.columns import Column
from rapidformer.accel.cuda_graph.filling import prove_filling
from rapidformer.accel.cuda_graph.graphs import GraphedPasses
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.passes import Outcome
from rapidformer.accel.cuda_graph.recorder import Recorder
from rapidformer.accel.cuda_graph.snapshot import (
    HostNumbers,
    Snapshot,
    count_unused_numbers,
    draw_unused,
)
from rapidformer.accel.cuda_graph.widths import Widths
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.parallelize import check_device
from rapidformer.accel.precision import processor
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.sharding.zero import ShardedGradients
from rapidformer.accel.unpad import batches, unpadding
from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.config import Settings
from rapidformer.data.batch import NO_BATCH
from rapidformer.data.update import MicroBatch, MicroBatchResult
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.objectives import Objective
from rapidformer.optim.gradients import take_gradients
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.overlay import find_fact
from rapidformer.tasks.embedding.objective import EmbeddingObjective, ItemCollator, LossSettings
from rapidformer.training.callbacks import Callback, Control, RunningLoop

T = TypeVar("T")
Rows = list[dict[str, Any]]


class Again:
    """Runs the function again, and writes what it returns where the first result is."""

    device, has_room = torch.device("cpu"), True
    is_16_bit = compiles = False

    def __init__(self, *changed: torch.Tensor) -> None:
        self.recorded = self.replayed = 0
        self._changed = changed
        """What the function changes in place: recording it must not."""

    def warm_up(self, function: Callable[[], T], *, forbids_reads: bool) -> T:
        return function()

    def close(self) -> None:
        """There is no memory to give back."""

    def record(self, function: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        before = torch.get_rng_state()
        values = [tensor.clone() for tensor in self._changed]
        first = function()
        torch.set_rng_state(before)
        for tensor, value in zip(self._changed, values, strict=True):
            tensor.copy_(value)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            now = function()
            for mine, theirs in zip(_list(first), _list(now), strict=True):
                mine.copy_(theirs)

        return first, replay


class Stale(Again):
    """A replay that does not see its inputs."""

    def record(self, function: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        first, _ = super().record(function)

        def replay() -> None:
            function()  # draws its random numbers

        return first, replay


class Full(Again):
    """There is no memory for the second recording."""

    fails = True

    def record(self, function: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        if self.recorded == 1 and self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(function)


def _list(outcome: Outcome | list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(outcome, list):
        return outcome
    gradients = [gradient for gradient in outcome.gradients or () if gradient is not None]
    norm = [outcome.norm] if outcome.norm is not None else []
    return [*norm, *(result.loss for result in outcome.results), *gradients]


class Values(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        if "loss" in line:
            self.lines.append({key: line[key] for key in ("step", "loss", "grad_norm", "lr")})


class Recordable(MultiTensorAdamW):
    """An optimizer whose update can be part of a graph."""

    launches = 0

    def find_launch(self) -> Any:
        return Launch(self)


class Launch:
    def __init__(self, optimizer: Recordable) -> None:
        self._optimizer = optimizer
        given = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in given if p.grad is not None]
        self.is_sharded = any(isinstance(p, DTensor) for p in given)

    def prepare(self) -> bool:
        return True

    def run(self, divisor: Any = None, flag: Any = None, gradients: Any = None) -> None:
        if flag == 1.0:
            return
        self._optimizer.launches += 1
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if divisor is None else gradient / divisor
        torch.optim.AdamW.step(self._optimizer)
        take_gradients(self.parameters)


class Run(Finetuner):
    optimizer: torch.optim.Optimizer | None = None
    is_16_bit = False
    """Whether to treat the run as one in mixed precision, although it is not."""

    def __init__(self, model: Any, rows: Rows, capture: Any, **settings: Any) -> None:
        base: dict[str, Any] = {
            "micro_batch_size": 4, "epochs": 1, "lr": 1e-2, "lr_warmup_iters": 3, "log_interval": 1,
            "dataloader_type": "single", "save": "none", "num_workers": 0, "clip_grad": 0.5,
        }  # fmt: skip
        super().__init__(RapidformerEngine(args={**base, **settings}))
        self.values = Values()
        self.callbacks = [self.values]
        self._model, self._rows, self._capture = model, rows, capture

    def train_valid_test_datasets_provider(self) -> Any:
        return self._rows, self._rows[:4], None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return self._model, self.optimizer, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> Any:
        losses = [model[0](**batch).loss for batch in eval_dataloader]
        return {"loss": float(torch.stack(losses).mean())}

    def compose(self) -> Any:
        model = super().compose()
        if self._capture is not None:
            engine = self.engine
            synchronizer = engine.model.parallelized.synchronizer
            is_sharded = isinstance(synchronizer, ShardedGradients)
            placed = synchronizer.place_weights() if is_sharded else None
            with placed.whole() if placed else nullcontext():
                prove_filling(model, engine.model.parallelized.plan, None)
            self._capture.is_16_bit = self.is_16_bit
            engine.updates.graphs = GraphedPasses(
                model, placed.parameters if placed else engine.model.parameters,
                self._capture, engine.updates.weights.count_labels,
                is_asked=False, work=engine.model.work,
                topology=engine.runtime.topology,
                exchange=synchronizer if isinstance(synchronizer, GradientReducer) else placed,
            )  # fmt: skip
        return model


class Mixed(Run):
    """A run in mixed precision, as far as CUDA graphs know."""

    is_16_bit = True


def make_bert(dropout: float) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        max_position_embeddings=128,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def make_rows(count: int, longest: int = 90) -> Rows:
    torch.manual_seed(1)
    lengths = torch.randint(5, longest, (count,)).tolist()
    return [
        {"input_ids": torch.randint(5, 60, (length,)).tolist(), "labels": length % 2}
        for length in lengths
    ]


def make_gpt2(n_positions: int = 16, dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    more = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=n_positions, **more
    )
    return GPT2LMHeadModel(config)


def make_texts(count: int) -> Rows:
    torch.manual_seed(1)
    rows = torch.randint(5, 60, (count, 16)).tolist()
    return [{"input_ids": ids, "labels": ids} for ids in rows]


@pytest.mark.parametrize("more", [{}, {"global_batch_size": 8}], ids=["plain", "accumulated"])
def test_fixed_shapes_give_the_same_bits(more: dict[str, Any]) -> None:
    """Losses, norms, learning rates and weights, with dropout."""
    off = Run(make_gpt2(), make_texts(48), None, **more)
    off.train()
    capture = Again()
    on = Run(make_gpt2(), make_texts(48), capture, **more)
    on.train()
    assert on.engine.updates.graphs is not None
    assert on.engine.updates.graphs.problem is None
    assert capture.recorded == 1
    assert capture.replayed > 2
    assert on.values.lines == off.values.lines
    for mine, theirs in zip(on.engine.model.parameters, off.engine.model.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_large_tensors_are_copied_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[dict[str, Any]]:
        capture = Again()
        run = Run(make_gpt2(), make_texts(24), capture)
        run.train()
        assert capture.replayed > 2
        return run.values.lines

    expected = train()
    monkeypatch.setattr(inputs, "_is_copied_alone", lambda tensor: True)
    assert train() == expected


def test_numbers_drawn_on_the_host_without_effect_do_not_prevent_a_graph() -> None:
    """OPT draws one for each block to decide whether to skip it, even if the chance is 0."""
    config = OPTConfig(
        vocab_size=60, hidden_size=16, ffn_dim=16, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.0,
    )  # fmt: skip
    model, ids = OPTForCausalLM(config), torch.arange(5, 15)[None]
    unused = count_unused_numbers(model)
    before = HostNumbers(has_device=True)
    assert before.count_unused(unused) == 0
    model.train()(input_ids=ids)
    assert before.count_unused(unused) == 3
    after = torch.get_rng_state()
    before.restore()
    draw_unused(3)
    assert torch.equal(after, torch.get_rng_state())
    torch.rand([])
    with pytest.raises(NotRepeatableError, match="draws random numbers on the host"):
        before.count_unused(unused)
    own = type("OwnOPT", (OPTForCausalLM,), {"__module__": __name__})(config)
    assert count_unused_numbers(own) == 0, "a user's model may use them"
    config.layerdrop = 0.1
    assert count_unused_numbers(model) == 0, "now they have an effect"


def test_each_recording_counts_the_numbers_that_its_own_passes_draw() -> None:
    capture: Any = SimpleNamespace(
        warm_up=lambda function, forbids_reads: function(),
        record=lambda function: (function(), lambda: None),
        is_16_bit=False, compiles=False,
    )  # fmt: skip
    recorder = Recorder(capture)

    def draw(count: int) -> Outcome:
        draw_unused(count)
        return Outcome([], None, torch.zeros(()))

    def make_passes(count: int) -> Any:
        run = functools.partial(draw, count)
        return SimpleNamespace(
            run=run, run_passes=run, rehearse=run, count=1, updated=(), used=None,
            without_effect=nullcontext, shifted=nullcontext, prepare=lambda: True,
        )  # fmt: skip

    def take_snapshot() -> Snapshot:
        snapshot = Snapshot([], torch.device("cpu"))
        snapshot.host_numbers = HostNumbers(has_device=True)  # as if the model were on a GPU
        return snapshot

    recorder.warm_up(make_passes(0), take_snapshot(), unused=3)
    before = torch.get_rng_state()
    recorder.record(make_passes(3), None, take_snapshot())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    draw_unused(3)
    assert torch.equal(torch.get_rng_state(), after), "as one replay of the passes"
    with pytest.raises(NotRepeatableError, match="draws random numbers on the host"):
        recorder.record(make_passes(2), None, take_snapshot())


class Looking(Callback):
    """Counts the steps in which it sees gradients."""

    seen = 0

    def on_pre_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        self.seen += loop.engine.model.parameters[0].grad is not None


@pytest.mark.parametrize("clip_grad", [0.0, 0.1])
def test_the_optimizer_in_the_graph(clip_grad: float) -> None:
    """The same bits; clipping multiplies on a CPU and divides in a graph, which may round apart."""
    runs = []
    for capture in (None, Again()):
        run = Run(make_gpt2(), make_texts(40), capture, global_batch_size=8, clip_grad=clip_grad)
        run.optimizer = Recordable(run._model.parameters(), lr=1e-2)
        run.train()
        runs.append(run)
    off, on = runs
    assert isinstance(on.optimizer, Recordable)
    assert on.optimizer.launches > 2
    limit = 1e-5 if clip_grad else 0.0
    for mine, theirs in zip(on.values.lines, off.values.lines, strict=True):
        assert mine == pytest.approx(theirs, rel=limit, abs=0.0)
    for mine, theirs in zip(on.engine.model.parameters, off.engine.model.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("who", ["callback", "hook"])
def test_gradients_stay_visible_to_callbacks_and_hooks(who: str) -> None:
    run = Run(make_gpt2(), make_texts(20), Again())
    optimizer = run.optimizer = Recordable(run._model.parameters(), lr=1e-2)
    looking, steps = Looking(), []
    if who == "callback":
        run.callbacks = [looking]
    else:
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
    run.train()
    assert run.engine.updates.graphs is not None
    assert run.engine.updates.graphs.count == 1
    assert optimizer.launches == 0
    assert looking.seen + len(steps) == 5


def test_rows_of_different_lengths(caplog: pytest.LogCaptureFixture) -> None:
    """Few graphs for many lengths, and the results of a run that never replays, with dropout."""
    capture = Again()
    on = Run(make_bert(0.1), make_rows(40), capture)
    on.train()
    assert on.engine.updates.graphs is not None
    assert on.engine.updates.graphs.problem is None
    assert 1 < on.engine.updates.graphs.count <= 6
    assert capture.replayed > capture.recorded
    # A larger size that cannot be recorded ahead does not cost the other graphs.
    full = Full()
    short = Run(make_bert(0.1), make_rows(40), full)
    with caplog.at_level("INFO", "rapidformer"):
        short.train()
    assert not full.fails
    assert "no CUDA graph was recorded ahead for larger batches (" in caplog.text
    assert short.engine.updates.graphs is not None
    assert short.engine.updates.graphs.problem is None
    assert short.engine.updates.graphs.count > 1
    assert short.values.lines == on.values.lines
    plain = Run(make_bert(0.0), make_rows(24), None)
    plain.train()
    filled = Run(make_bert(0.0), make_rows(24), Again())
    filled.train()
    mine = [line["loss"] for line in filled.values.lines]
    assert mine == pytest.approx([line["loss"] for line in plain.values.lines], rel=1e-5)


def test_other_sizes_are_recorded_before_the_first_comes_again() -> None:
    """Sizes 1 2 1 2: the first step sets things up, the next two are recorded."""
    rows = make_rows(16, longest=10)
    for step in range(4):
        rows[4 * step]["input_ids"] = [7] * (50, 120)[step % 2]
    lines = []
    for steps, count in ((3, 0), (4, 2)):
        capture = Again()
        run = Mixed(make_bert(0.1), rows[: 4 * steps], capture, lr_decay_style="constant")
        run.train()
        assert run.engine.updates.graphs is not None
        assert (capture.recorded, run.engine.updates.graphs.count) == (2, count)
        lines.append(run.values.lines)
    assert lines[0] == lines[1][:3]


def make_bloom() -> Any:
    """It computes attention itself, which gets padded rows."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
    return BloomForCausalLM(config)


def make_hybrid(dropout: float = 0.0) -> Any:
    """Two of its three blocks scan their tokens, in chunks."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=64, attention_dropout=dropout, pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def make_texts_of_rows(count: int) -> Rows:
    return [{**row, "labels": row["input_ids"]} for row in make_rows(count)]


@pytest.mark.parametrize("make", [make_bloom, make_hybrid])
def test_rows_of_different_lengths_that_blocks_know_from_the_call(make: Callable[[], Any]) -> None:
    """A few graphs for all lengths, as for other models."""

    def train(capture: Again | None, **settings: Any) -> Run:
        run = Run(make(), make_texts_of_rows(48), capture, **settings)
        run.train()
        return run

    plain, capture = train(None, dynamic_shape="off"), Again()
    graphed = train(capture)
    assert graphed.engine.updates.graphs is not None
    assert graphed.engine.updates.graphs.problem is None
    assert graphed.engine.updates.graphs.count <= 6
    assert capture.replayed > capture.recorded
    mine = [line["loss"] for line in graphed.values.lines]
    assert mine == pytest.approx([line["loss"] for line in plain.values.lines], rel=1e-5)


def make_mamba() -> Any:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0
    )
    return MambaForCausalLM(config)


def make_varied_texts(*longest: int) -> Rows:
    """Four rows for each number, of at most so many tokens."""
    torch.manual_seed(1)
    lengths = [int(torch.randint(most // 2, most, ())) for most in longest for _ in range(4)]
    texts = [torch.randint(5, 60, (length,)).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in texts]


def test_rows_of_different_lengths_in_a_model_that_keeps_its_padding() -> None:
    """A state-space model carries tokens along a row, so padding is computed; but after the row."""
    rows = make_varied_texts(*range(20, 100, 8), *range(20, 100, 8))
    plain = Run(make_mamba(), rows, None)
    plain.train()
    capture, model = Again(), make_mamba()
    graphed = Mixed(model, rows, capture)
    graphed.train()
    assert find_fact(model, Removal) is None
    assert capture.recorded <= 2 < capture.replayed
    mine = [line["loss"] for line in graphed.values.lines]
    assert mine == pytest.approx([line["loss"] for line in plain.values.lines], rel=1e-5)


def test_a_model_keeps_its_padding_if_only_padded_steps_can_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Llama 4 on a GPU: its masks read a tensor there, so a graph does not know its windows."""
    rows = make_varied_texts(*range(20, 100, 4))
    plain = Run(make_gpt2(128, 0.0), rows, None, dynamic_shape="off")
    plain.train()
    monkeypatch.setattr(RowMask, "window", None)
    prove = functools.partial(prove_filling, may_yield=True)
    monkeypatch.setattr(sys.modules[__name__], "prove_filling", prove)
    capture, model = Again(), make_gpt2(128, 0.0)
    graphed = Mixed(model, rows, capture)
    graphed.train()
    removal = find_fact(model, Removal)
    assert removal is not None and not removal.is_on
    assert capture.recorded <= 2 < capture.replayed
    mine = [line["loss"] for line in graphed.values.lines]
    assert mine == pytest.approx([line["loss"] for line in plain.values.lines], rel=1e-5)


class OtherwiseIfLong(Mixed):
    """Its loss depends on the width of a batch, as sparse attention does, but only of wide ones."""

    narrow = 64

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * (1 + (batch["input_ids"].shape[1] > self.narrow))


def test_rounding_next_to_a_kink_does_not_depend_on_the_width() -> None:
    """A number next to zero that rounding moves across ReLU's kink changes a whole gradient."""
    weight = torch.nn.Parameter(torch.ones(4))
    model = torch.nn.ParameterList([weight])

    def run(batch: MicroBatch, noise: float) -> MicroBatchResult:
        width = batch.batch["input_ids"].shape[1]
        hidden = weight - torch.tensor([1.0 - noise * (width - 8), 0.0, 0.0, 0.0])
        return MicroBatchResult(loss=torch.relu(hidden).sum(), weight=1.0)

    ids = torch.ones(2, 8, dtype=torch.long)
    micro_batch = MicroBatch({"input_ids": ids}, NO_BATCH, False, True, 0, 0)
    widths = Widths(model, [weight], torch.device("cpu"), is_16_bit=True, warns=False)
    take_snapshot = functools.partial(Snapshot, [], torch.device("cpu"))
    columns = {"input_ids": Column(16, 0)}
    for noise, is_same in ((1e-7, True), (0.1, False)):
        step = functools.partial(run, noise=noise)
        problem = widths._compare(step, columns, take_snapshot, micro_batch)
        assert (problem is None) == is_same


@pytest.mark.parametrize(("change", "is_same"), [(0.0, True), (1e-6, False)])
def test_rounding_that_a_model_amplifies_does_not_count_as_a_change(
    change: float, is_same: bool
) -> None:
    """As in Gemma 4 with random weights: 1e-7 at first is a tenth of the gradient in the end."""
    weight = torch.nn.Parameter(torch.tensor([0.3]))
    sizes = []

    def run(batch: MicroBatch) -> MicroBatchResult:
        added = batch.batch["input_ids"].shape[1] - 8
        hidden = weight.float()  # a norm computes in fp32, whatever comes in
        assert hidden.dtype == torch.float32  # code that asks does in fp64 what it does in fp32
        sizes.append(hidden.element_size())
        hidden = hidden + added * ({4: 2.0**-23, 8: 2.0**-52}[sizes[-1]] + change)
        for _ in range(16):
            hidden = 3.9 * hidden * (1 - hidden)
        return MicroBatchResult(loss=hidden.sum() * 1e-6 + 1.0, weight=1.0)

    micro_batch = MicroBatch(
        {"input_ids": torch.ones(2, 8, dtype=torch.long)}, NO_BATCH, False, True, 0, 0
    )
    model, device = torch.nn.ParameterList([weight]), torch.device("cpu")
    widths = Widths(model, [weight], device, is_16_bit=True, warns=False)
    take_snapshot = functools.partial(Snapshot, [], device)
    problem = widths._compare(run, {"input_ids": Column(16, 0)}, take_snapshot, micro_batch)
    assert (problem is None) == is_same
    assert problem is None or "gradients change" in problem
    assert sizes == [4] * 2 + [8] * 2
    assert weight.dtype == torch.float32 and weight.grad is None


@pytest.mark.parametrize(
    ("narrow", "longest", "rows"),
    [
        (100, (20, 24, 28, 32, 36, 40, 80, 90, 70, 84), 4),
        (100, (120, 124, 122, 74, 70, 120, 72), 4),  # wide ones first, which get the same width
        (150, (74, 250, 72, 240, 70, 245), 8),  # narrow ones beside wide ones
    ],
)
def test_each_width_is_compared_in_a_model_that_keeps_its_padding(
    narrow: int,
    longest: tuple[int, ...],
    rows: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(OtherwiseIfLong, "narrow", narrow)
    lines = []
    for capture in (None, Again()):
        texts = make_varied_texts(*longest)
        run = OtherwiseIfLong(make_mamba(), texts, capture, global_batch_size=rows)
        run.train()
        lines.append([line["loss"] for line in run.values.lines])
    assert "so batches keep their widths" in caplog.text
    assert lines[1] == pytest.approx(lines[0], rel=1e-5)


def test_each_width_is_compared_of_batches_without_padding(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones are too narrow to show that the loss depends on their width."""
    warn_once.cache_clear()
    monkeypatch.setattr(OtherwiseIfLong, "narrow", 100)
    rows = [
        {"input_ids": row["input_ids"], "labels": len(row["input_ids"]) % 2}
        for row in make_varied_texts(40, 42, 44, 40, 80, 84, 82, 44, 86)
    ]
    lines = []
    for capture in (None, Again()):
        run = OtherwiseIfLong(make_bert(0.0), rows, capture)
        run.train()
        lines.append([line["loss"] for line in run.values.lines])
    assert "so batches keep their widths" in caplog.text
    assert lines[1] == pytest.approx(lines[0], rel=1e-5)


class Embedded(Run):
    """Learns vectors of texts: batches without labels, of whose padding nothing is read."""

    def build_objective(self) -> Objective:
        return EmbeddingObjective(LossSettings(name="infonce"), "mean", normalizes=True)


def test_embeddings_of_texts_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[row["input_ids"] for row in make_rows(64)][n : n + 2] for n in range(0, 64, 2)]
    items = [
        {"input_ids": pair, "text_ids": [2 * number, 2 * number + 1], "scores": []}
        for number, pair in enumerate(rows)
    ]

    def train(capture: Again | None) -> Embedded:
        run = Embedded(make_bert(0.0).bert, items, capture)
        run.run_compute_metrics = lambda *_: {"loss": 0.0}  # type: ignore[method-assign]
        collate = ItemCollator({}, "right", texts=2, scores=0)
        run.train_valid_test_datasets_provider = lambda: (  # type: ignore[method-assign]
            items, None, None, collate
        )  # fmt: skip
        run.train()
        return run

    plain = train(None)
    capture = Again()
    record = capture.record

    def record_blindly(function: Callable[[], Outcome]) -> Any:
        def run() -> Outcome:
            with monkeypatch.context() as patches:  # a graph cannot ask the device for the mask
                patches.setattr(batches, "get_host_copy", None)
                return function()

        return record(run)

    monkeypatch.setattr(capture, "record", record_blindly)
    graphed = train(capture)
    assert graphed.engine.updates.graphs is not None
    assert graphed.engine.updates.graphs.problem is None
    assert capture.replayed > capture.recorded
    mine = [line["loss"] for line in graphed.values.lines]
    assert mine == pytest.approx([line["loss"] for line in plain.values.lines], rel=1e-5)


def make_t5(dropout: float, d_kv: int = 4) -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=60, d_model=16, d_kv=d_kv, d_ff=16, num_layers=1, num_heads=4,
        dropout_rate=dropout, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def make_bart(dropout: float) -> Any:
    torch.manual_seed(0)
    sizes = {
        "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    }  # fmt: skip
    config = BartConfig(vocab_size=60, d_model=16, dropout=dropout, **sizes)
    return BartForConditionalGeneration(config)


def make_pairs(count: int) -> Rows:
    torch.manual_seed(1)
    lengths = torch.randint(5, 60, (count, 2)).tolist()
    ids = [[torch.randint(5, 60, (length,)).tolist() for length in pair] for pair in lengths]
    return [{"input_ids": source, "labels": target} for source, target in ids]


@functools.cache
def train_padded(make: Callable[[float], Any]) -> list[float]:
    """The losses of a run without graphs."""
    run = Run(make(0.0), make_pairs(36), None, dynamic_shape="off")
    run.train()
    return [line["loss"] for line in run.values.lines]


@pytest.mark.parametrize("dynamic_shape", ["off", "on"])
@pytest.mark.parametrize("make", [make_t5, make_bart])
def test_an_encoder_decoder_with_rows_of_different_lengths(
    make: Callable[[float], Any], dynamic_shape: str
) -> None:
    """A few graphs for all lengths of both sides, and the results of a run without."""
    capture, model = Again(), make(0.0)
    graphed = Mixed(model, make_pairs(36), capture, dynamic_shape=dynamic_shape)
    graphed.train()
    removal = find_fact(model, Removal)
    assert (removal is not None and removal.has_removed) == (dynamic_shape == "on")
    assert graphed.engine.updates.graphs is not None
    assert graphed.engine.updates.graphs.problem is None
    assert capture.replayed > capture.recorded > 1
    mine = [line["loss"] for line in graphed.values.lines]
    assert mine == pytest.approx(train_padded(make), rel=1e-5)


class Crowded(Mixed):
    """There is no memory for the comparison of more than two rows."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        if not model.training and len(batch["labels"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(**batch).loss


def test_wider_batches_are_compared_on_fewer_rows_if_memory_is_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    capture = Again()
    Crowded(make_t5(0.0), make_pairs(24), capture, dynamic_shape="off").train()
    assert capture.replayed > capture.recorded > 1
    assert "batches keep their widths" not in caplog.text


def test_in_fp32_a_wider_batch_must_have_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    """T5's position bias is summed over other widths, in another order."""
    warn_once.cache_clear()
    plain = Run(make_t5(0.0), make_pairs(24), None, dynamic_shape="off")
    plain.train()
    graphed = Run(make_t5(0.0), make_pairs(24), Again(), dynamic_shape="off")
    graphed.train()
    assert "in fp32, a batch with more columns has other last bits" in caplog.text
    assert graphed.values.lines == plain.values.lines


class MeanOverAll(Mixed):
    """Its loss is a mean over all positions, padded ones included."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        labels = batch.pop("labels")
        logits = model(**batch, labels=labels).logits
        each = functional.cross_entropy(logits.mT, labels, reduction="none")
        return each.mean()


class TwoPasses(Mixed):
    """Its loss includes how far dropout moves the outputs, those for padding as well."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        first, second = model(**batch), model(**batch)
        return first.loss + (first.logits - second.logits).pow(2).mean()


class Later(Mixed):
    """A term over all positions that has no weight yet."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss + 0.0 * outputs.encoder_last_hidden_state.pow(2).mean()


class Statistic(Mixed):
    """Reads what its model returns for padding without a gradient."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss * (1 + 1e-9 * outputs.logits.detach().mean())


class Learned(Mixed):
    """A mean over all positions, with a weight of the model's own that is still 0."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        outputs = model(**batch)
        losses = functional.cross_entropy(outputs.logits.mT, batch["labels"], reduction="none")
        return outputs.loss + model.extra * losses.mean()


class Outside(Mixed):
    """The same with a tensor that a callback may change at any time."""

    extra = torch.zeros(())

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        outputs = model(**batch)
        losses = functional.cross_entropy(outputs.logits.mT, batch["labels"], reduction="none")
        return outputs.loss + self.extra * losses.mean()


_DEPENDS = "the loss depends on the number of columns of a batch ("
_READS = "the loss reads what the model returns for padding (leave it out: "


_LEARNS = "gradients change if a batch has more columns (by "


@pytest.mark.parametrize(
    ("kind", "message", "dynamic_shape"),
    [
        (MeanOverAll, _DEPENDS, "auto"),
        (TwoPasses, _READS, "auto"),
        (Later, _READS, "auto"),
        (Statistic, _READS, "auto"),
        (Learned, _LEARNS, "auto"),
        (Outside, "", "auto"),
        # The batches are the same; one of each kind of message.
        (MeanOverAll, _DEPENDS, "off"),
        (TwoPasses, _READS, "off"),
        (Learned, _LEARNS, "off"),
    ],
)
def test_a_loss_that_changes_with_the_width_of_its_batch(
    kind: type[Run],
    message: str,
    dynamic_shape: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(unpadding, "_only_pays_in_graphs", lambda assembly: True)  # as on a GPU
    runs = []
    for capture in (None, Again()):
        model = make_t5(0.1)
        if kind is Learned:
            model.extra = torch.nn.Parameter(torch.zeros(()))
        run = kind(model, make_pairs(24), capture, dynamic_shape=dynamic_shape)
        run.train()
        runs.append(run.values.lines)
    assert runs[0] == runs[1]
    assert message in caplog.text
    assert "--dynamic-shape:" not in caplog.text, "one warning is enough"


def test_a_classifier_with_as_many_classes_as_columns(caplog: pytest.LogCaptureFixture) -> None:
    """Its logits are not taken for columns of the batch, which the loss would read."""
    warn_once.cache_clear()
    torch.manual_seed(0)
    config = make_bert(0.0).config
    config.num_labels = 128
    capture = Again()
    run = Mixed(BertForSequenceClassification(config), make_rows(24, longest=50), capture)
    run.train()
    assert capture.recorded
    assert "so batches keep their widths" not in caplog.text


class LaterNumber(Mixed):
    """A mean over all positions, with a number as its weight that leaves 0 in the run."""

    extra = 0.0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        outputs = model(**batch)
        losses = functional.cross_entropy(outputs.logits.mT, batch["labels"], reduction="none")
        return outputs.loss + self.extra * losses.mean()


class WarmUp(Callback):
    def __init__(self, run: LaterNumber) -> None:
        self._run = run

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        self._run.extra = 0.0 if loop.step < 6 else 0.5


def test_a_term_that_is_warmed_up_is_compared_when_it_appears(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    losses = []
    for capture in (None, Again()):
        run = LaterNumber(make_t5(0.0), make_pairs(48), capture, dynamic_shape="off")
        run.callbacks = [run.values, WarmUp(run)]
        run.train()
        losses.append([line["loss"] for line in run.values.lines])
    assert capture is not None
    assert capture.recorded, "while it has no weight, batches are wider"
    assert _DEPENDS in caplog.text
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class Weighted(Run):
    """Its batches have a tensor that the library does not know."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        batch.pop("weights")
        return model(**batch).loss


def make_long_rows(length: int) -> Rows:
    """Every third batch has a row of this length."""
    rows = make_rows(48, longest=20)
    for row in rows[::12]:
        row["input_ids"] = [7] * length
    return [{**row, "weights": [1] * len(row["input_ids"])} for row in rows]


@pytest.mark.parametrize("case", ["unpadded T5", "almost too long", "unknown tensors"])
def test_results_do_not_depend_on_what_is_replayed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, a batch that is unpadded only outside graphs would draw other numbers."""

    def train() -> Run:
        if case == "unpadded T5":
            run = Run(make_t5(0.1), make_pairs(32), Again(), dynamic_shape="on")
        elif case == "almost too long":
            rows = [{**row, "weights": 0} for row in make_long_rows(126)]
            run = Weighted(make_bert(0.1), rows, Again())
        else:
            run = Weighted(make_bert(0.1), make_long_rows(30), Again())
        run.train()
        assert run.engine.updates.graphs is not None
        assert run.engine.updates.graphs.problem is None
        return run

    replayed = train()
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 0)
    assert replayed.values.lines == train().values.lines


def test_noise_that_depends_on_the_width_of_a_batch_stays_the_same() -> None:
    losses = []
    for capture in (None, Again()):
        run = Run(make_bert(0.0), make_rows(24, longest=20), capture, neftune_noise_alpha=50.0)
        run.train()
        losses.append([line["loss"] for line in run.values.lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def collate_encodings(rows: Rows) -> BatchEncoding:
    def pad(name: str, value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[name]) for row in rows], True, value)

    ids = pad("input_ids", 0)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad("labels", -100)}
    return BatchEncoding(batch)


class Attributes(Mixed):
    """Uses what a dictionary does not have."""

    def train_valid_test_datasets_provider(self) -> Any:
        return self._rows, self._rows[:4], None, collate_encodings

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(batch.input_ids, batch.attention_mask, labels=batch.labels).loss


class Training(Run):
    def run_forward_step(self, batch: Any, model: Any) -> Any:
        if not model.training:
            raise ValueError("not in training\nmore")
        return model(**batch).loss


def test_a_comparison_keeps_the_type_of_a_batch_and_says_why_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    capture = Again()
    Attributes(make_t5(0.0), make_pairs(32), capture, dynamic_shape="off").train()
    assert capture.replayed > capture.recorded
    run = Training(make_t5(0.0), make_pairs(16), Again(), dynamic_shape="off")
    run.train()
    assert "a step fails without dropout (ValueError: not in training), so" in caplog.text
    assert run.engine.updates.graphs is not None
    assert run.engine.updates.graphs.problem is None


def draw_with_numpy(self: Any, **batch: Any) -> Any:
    outputs = GPT2LMHeadModel.forward(self, **batch)
    outputs.loss = outputs.loss * (1 + np.random.random())
    return outputs


def test_numbers_drawn_before_giving_up_are_drawn_again() -> None:
    """As speech models do to mask their inputs."""
    # As if transformers had written it: code of the user's own is read first.
    members = {"forward": draw_with_numpy, "__module__": "transformers.models"}
    lines = []
    for capture in (None, Again()):
        np.random.seed(0)
        model = make_gpt2()
        model.__class__ = type("Masking", (GPT2LMHeadModel,), members)
        run = Run(model, make_texts(12), capture)
        run.train()
        lines.append(run.values.lines)
    assert run.engine.updates.graphs is not None
    assert "draws random numbers on the host" in str(run.engine.updates.graphs.problem)
    assert lines[0] == lines[1]


class OneGradient(Again):
    """A replay that leaves the gradient of the last weight as it was: loss and norm are right."""

    def record(self, function: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        first, replay = super().record(function)
        *_, last = (gradient for gradient in first.gradients or () if gradient is not None)
        last.mul_(-1)

        def replay_others() -> None:
            replay()
            last.mul_(-1)

        return first, replay_others


def test_every_gradient_of_a_replay_is_compared() -> None:
    off = Run(make_gpt2(), make_texts(24), None)
    off.train()
    run = Run(make_gpt2(), make_texts(24), OneGradient())
    run.train()
    assert run.engine.updates.graphs is not None
    text = r"replaying a step gave 1 of 28 gradients other values than running it \(by 2.0e\+00"
    assert re.match(text, str(run.engine.updates.graphs.problem))
    assert run.values.lines == off.values.lines


class Frozen(Again):
    """A replay with the tokens that were there when it was recorded, for every other recording."""

    def record(self, function: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        first, replay = super().record(function)
        if self.recorded % 2:
            return first, replay
        kept = [tensor.clone() for tensor in _list(first)]

        def replay_kept() -> None:
            replay()
            for mine, value in zip(_list(first), kept, strict=True):
                mine.copy_(value)

        return first, replay_kept


def test_every_graph_is_compared_on_two_batches() -> None:
    """The second one gives the right results for the batch that it was recorded with."""
    lines = []
    for capture in (None, Frozen()):
        run = Scaled(make_gpt2(), make_texts(32), capture)
        run.callbacks = [run.values, Halving(run)]
        run.train()
        lines.append(run.values.lines)
    assert capture is not None
    assert capture.recorded == 2
    assert run.engine.updates.graphs is not None
    assert "replaying a step gave" in str(run.engine.updates.graphs.problem)
    assert lines[0] == lines[1]


def test_closing_drops_the_graphs() -> None:
    class Counted(Again):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    capture = Counted()
    run = Run(make_gpt2(), make_texts(24), capture)
    run.train()
    graphs = run.engine.updates.graphs
    assert graphs is not None
    assert graphs.count == 1
    graphs.close()
    assert (graphs.count, capture.closed) == (0, 1)


class Annealed(Run):
    rate = 1.0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * self.rate


class Annealing(Callback):
    def __init__(self, run: Annealed) -> None:
        self._run = run

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        self._run.rate = 1.0 / (1 + loop.step)


def test_a_number_that_changes_in_every_step_is_named() -> None:
    run = Annealed(make_gpt2(), make_texts(60), Again())
    run.callbacks = [Annealing(run)]
    run.train()
    assert run.engine.updates.graphs is not None
    assert "self.rate has another value in every step: keep it" in str(
        run.engine.updates.graphs.problem
    )


class Casting(Callback):
    """Runs a few steps in another precision."""

    def __init__(self) -> None:
        self._cast = torch.autocast("cpu", torch.bfloat16)

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        if loop.step == 3:
            self._cast.__enter__()

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        if loop.step == 6:
            self._cast.__exit__(None, None, None)


def test_steps_in_another_precision_have_another_graph() -> None:
    run = Run(make_gpt2(), make_texts(48), Again())
    run.callbacks = [Casting()]
    run.train()
    assert run.engine.updates.graphs is not None
    assert (run.engine.updates.graphs.problem, run.engine.updates.graphs.count) == (None, 2)


def test_a_replay_that_differs_is_not_used() -> None:
    off = Run(make_gpt2(), make_texts(24), None)
    off.train()
    run = Run(make_gpt2(), make_texts(24), Stale())
    run.train()
    assert run.engine.updates.graphs is not None
    assert "replaying a step gave" in str(run.engine.updates.graphs.problem)
    assert run.values.lines == off.values.lines


def test_evaluation_checkpoint_and_resuming(tmp_path: Path) -> None:
    """A run that is interrupted has other graphs, and the same results."""
    rows = make_rows(32, longest=40)
    more: dict[str, Any] = {"eval_interval": 2, "async_save": False}
    whole = Run(make_bert(0.1), rows, Again(), **more)
    whole.train()
    more["save"] = str(tmp_path / "run")
    Run(make_bert(0.1), rows, Again(), **more, exit_interval=4).train()
    rest = Run(make_bert(0.1), rows, Again(), **more, load=more["save"])
    rest.train()
    assert [line["step"] for line in rest.values.lines] == [5, 6, 7, 8]
    assert rest.values.lines == whole.values.lines[4:]
    assert rest.engine.updates.graphs is not None
    assert rest.engine.updates.graphs.count


def test_a_bad_loss_is_found() -> None:
    """A NaN in a replayed step is skipped as it would be otherwise."""

    def spoil(run: Run) -> list[dict[str, Any]]:
        run.callbacks = [run.values, Spoiler()]
        run.train()
        return run.values.lines

    more: dict[str, Any] = {"on_bad_loss": "skip", "log_interval": 2}
    off = spoil(Run(make_gpt2(), make_texts(32), None, **more))
    on = spoil(Run(make_gpt2(), make_texts(32), Again(), **more))
    assert [line["step"] for line in on] == [1, 2, 4, 5, 7]
    assert on == off


class Spoiler(Callback):
    """One weight is NaN for one step."""

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        weight = loop.engine.model.parameters[0].data
        if loop.step == 4 and not hasattr(self, "kept"):
            self.kept = weight.clone()
            weight.fill_(float("nan"))

    def on_pre_optimizer_step(self, loop: RunningLoop, control: Control) -> None:
        if hasattr(self, "kept"):
            loop.engine.model.parameters[0].data.copy_(self.kept)


class Scaled(Run):
    factor = 1.0

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * self.factor


class Halving(Callback):
    def __init__(self, run: Scaled) -> None:
        self._run = run

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        self._run.factor = 1.0 if loop.step < 4 else 0.5


def test_a_number_that_changes_needs_another_graph() -> None:
    capture = Again()
    run = Scaled(make_gpt2(), make_texts(32), capture)
    run.callbacks = [Halving(run)]
    run.train()
    assert run.engine.updates.graphs is not None
    assert run.engine.updates.graphs.problem is None
    assert capture.recorded == 2


class Moving(Run):
    """Keeps means of its losses outside the model, in place: one counted as a change, one not."""

    def __init__(self, *, replays: bool) -> None:
        self.center, self.mean = torch.zeros(()), torch.zeros(1)
        capture = Again(self.center, self.mean) if replays else None
        super().__init__(make_gpt2(), make_texts(32), capture)

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        self.center.mul_(0.9).add_(loss.detach())
        pair = torch.stack([loss.detach(), self.center])[:, None]
        functional.batch_norm(pair, self.mean, torch.ones(1), training=True)
        return loss * self.center


class Late(Callback):
    """Registers a hook in the middle of a run."""

    calls = 0

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        if loop.step == 5:
            head = loop.engine.model.parallelized.model.lm_head
            head.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))


def test_tensors_outside_the_model_and_a_late_hook() -> None:
    """A step that is recorded or compared moves the means once; the hook runs in every step."""
    runs, hooks = [], [Late(), Late()]
    for replays, hook in zip((False, True), hooks, strict=True):
        run = Moving(replays=replays)
        run.callbacks = [run.values, hook]
        run.train()
        runs.append(run)
    off, on = runs
    assert on.engine.updates.graphs is not None
    assert on.engine.updates.graphs.problem == "a replay would not run the hooks on lm_head"
    assert on.values.lines == off.values.lines
    assert torch.equal(on.center, off.center)
    assert torch.equal(on.mean, off.mean)
    assert hooks[1].calls == hooks[0].calls > 0


def test_batches_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues without graphs, whatever the error."""

    def fail(*_: Any) -> Any:
        raise TypeError("Batch() takes 2 arguments")

    monkeypatch.setattr(graphs, "Passes", fail)
    run = Run(make_gpt2(), make_texts(8), Again())
    run.train()
    assert run.engine.updates.graphs is not None
    assert run.engine.updates.graphs.problem == "TypeError: Batch() takes 2 arguments"
    assert len(run.values.lines) == 2


def test_only_a_gpu_has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that needs another device is reported at once."""
    monkeypatch.setattr(processor, "is_emulation_wanted", lambda: False)
    text = r"2 problems:\n  - --fp8: it needs an NVIDIA.*\n  - --cuda-graph on: it needs a CUDA"
    with pytest.raises(ConfigurationError, match=text):
        Run(make_gpt2(), make_texts(8), None, cuda_graph="on", fp8=True)


def test_fp16_is_refused_before_a_model_is_loaded() -> None:
    args = Settings(cuda_graph="on", mixed_precision="fp16")
    precision = Precision(dtype=torch.float16, reason="asked for")
    with pytest.raises(
        ConfigurationError, match="it works in fp32 and bf16, and this run is in fp16"
    ):
        check_device(args, torch.device("cuda"), precision)
