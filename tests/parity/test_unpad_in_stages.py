"""Without padding in a pipeline: each stage removes it, and all agree on who needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rapidformer import RapidformerEngine
from rapidformer.accel.unpad.calls import Removal
from rapidformer.overlay import find_fact
from rapidformer.verification.recorder import collect_weights
from tests.parity.harness import (
    PADDED,
    PIPELINE,
    SHORT,
    TENSOR,
    Case,
    Training,
    check,
    compose,
    keep_rate,
    make_sgd,
    run_one,
    zero,
)
from tests.parity.hooks import only_looking
from tests.parity.limits import STAGE_LIMITS, get_bytes
from tests.parity.test_unpad import ON, Removing
from tests.processes import run_in_kept_processes

Run = tuple[dict[str, Any], int, bool]
"""Of one process: its weights at the end, the tokens of its blocks, and if it removes padding."""


def stage(schedule: str, **more: Any) -> dict[str, Any]:
    return {**ON, PIPELINE: 2, "pipeline_schedule": schedule, **more}


def staged(model: str, layers: int, settings: dict[str, Any], rows: int = SHORT) -> Case:
    return Training(model, layers=layers, rows=rows, recorder=Removing), settings


def test_stages_compute_what_one_padded_process_does() -> None:
    cases = [
        staged("bert", 2, stage("gpipe")),
        staged("llama", 2, stage("1f1b", micro_batch_size=1, fused_loss="on"), rows=12),
        staged("gpt2", 4, stage("interleaved", checkpoint_activations=True)),
        staged("bert-mlm", 4, stage("zero-bubble")),
        staged("deberta", 2, stage("1f1b")),
        staged("gpt2-lora", 2, stage("1f1b")),
        staged("mistral", 2, stage("1f1b", compile=True, compile_backend="eager")),
    ]
    check(2, cases, STAGE_LIMITS, are_copies_equal=True)


def test_stages_that_share_layers_or_weights_too() -> None:
    """With recompute, and with split tokens, whose slices differ between micro-batches."""
    cases = [
        staged("qwen3", 4, stage("interleaved", sequence_parallel=True, **{TENSOR: 2})),
        staged("gpt2", 2, stage("1f1b", checkpoint_activations=True, **{TENSOR: 2})),
        staged("bert-mlm", 4, stage("zero-bubble", **zero(2))),
        staged("llama", 4, stage("1f1b", checkpoint_activations=True, **zero(3)), rows=12),
    ]
    traces = check(4, cases, STAGE_LIMITS, are_copies_equal=True)
    whole = get_bytes(run_one(cases[-1][0]))
    assert max(get_bytes(trace) for trace in traces[-1]) < 0.28 * whole


# ---- who reads padding ---------------------------------------------------------------------------


def take_own_loss(model: nn.Module, batch: Any, step: int) -> Any:
    return model(**batch).loss


def read_padding(model: nn.Module, batch: Any, step: int) -> Any:
    return model(**batch).logits.pow(2).mean((1, 2)).mean()


def read_padding_later(model: nn.Module, batch: Any, step: int) -> Any:
    return (take_own_loss if step == 0 else read_padding)(model, batch, step)


def refuse_nan(model: nn.Module, batch: Any, step: int) -> Any:
    loss = read_padding(model, batch, step)
    if not loss.isfinite():
        raise ValueError("the loss is not a number")
    return loss


def read_by_hook(model: Any, batch: Any, step: int) -> Any:
    """On the rank of the last stage alone: the others do not know of it."""
    last, found = model.model.layers[-1], []
    is_here = any(p.numel() for p in last.parameters())
    handle = last.register_forward_hook(lambda *call: found.append(call[-1])) if is_here else None
    try:
        return model(**batch).loss + found[-1].pow(2).mean()
    finally:
        if handle is not None:
            handle.remove()


def pack(model: Any, batch: Any, step: int) -> Any:
    """All rows as one: only its positions tell where the next one begins."""
    is_real = batch["attention_mask"].bool()
    positions = (is_real.cumsum(1) - 1)[is_real]
    labels = batch["labels"].clone()
    labels[:, 0] = -100
    packed = {"input_ids": batch["input_ids"][is_real], "labels": labels[is_real]}
    packed["position_ids"] = positions
    return model(**{name: value[None] for name, value in packed.items()}, use_cache=False).loss


def give_nan_at_first(model: Any, batch: Any, step: int) -> Any:
    return read_padding(model, batch, step) * float("nan") if step == 0 else model(**batch).loss


Loss = Callable[[nn.Module, Any, int], Any]
SCHEDULES = ["1f1b", "interleaved", "zero-bubble"]


def train(loss: Loss, settings: dict[str, Any], layers: int = 2) -> Run:
    """Two updates of rows of any length, in micro-batches of two."""
    torch.set_num_threads(1)
    training = Training("llama", layers=layers, rows=16)
    engine, model, loader = compose(training, {"micro_batch_size": 2, **settings})
    model.train()
    tokens = 0

    @only_looking
    def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal tokens
        tokens += output.shape[0] * output.shape[1]

    layers: Any = model.model.layers
    for block in layers:
        block.mlp.register_forward_hook(count)
    for step, update in enumerate(engine.data.iterate_updates(loader)):
        engine.run_update(
            lambda batch, step=step: (loss(model, batch, step), len(batch["labels"])), update
        )
        engine.step()
    removal = find_fact(model, Removal)
    return collect_weights(model), tokens, removal is not None and removal.is_on


@functools.cache
def train_alone(loss: Loss, layers: int) -> dict[str, Any]:
    """The weights after training in one process with padding."""
    return train(loss, {"dynamic_shape": "off"}, layers)[0]


def compare(loss: Loss, layouts: list[dict[str, Any]], world_size: int = 2) -> list[list[Run]]:
    """Train under each layout as one process with padding does."""
    everyone = []
    for layout in layouts:
        layers = 2 if layout["pipeline_schedule"] == "1f1b" else 4
        expected = train_alone(loss, layers)
        runs = run_in_kept_processes(train, world_size, loss, layout, layers)
        for name, weight in runs[0][0].items():
            where = f"{name} under {layout}"
            np.testing.assert_allclose(weight, expected[name], rtol=0, atol=5e-6, err_msg=where)
        everyone.append(runs)
    return everyone


def test_blocks_compute_real_tokens_only() -> None:
    """Rows of 211 tokens in micro-batches of two; one of these has a single token of padding."""
    padded, removed = compare(take_own_loss, [stage("1f1b", dynamic_shape="off"), stage("1f1b")])
    assert [tokens for _, tokens, _ in padded] == [252] * 2  # of a block on each rank
    assert [tokens for _, tokens, _ in removed] == [212] * 2
    assert [is_on for _, _, is_on in removed] == [True, True]


@pytest.mark.parametrize(
    ("loss", "schedules"),
    [
        (read_padding, SCHEDULES),
        (read_padding_later, ["interleaved"]),
        (refuse_nan, ["1f1b", "zero-bubble"]),
        (read_by_hook, ["1f1b"]),
    ],
)
def test_an_update_whose_loss_reads_padding_is_computed_with_it(
    loss: Loss, schedules: list[str]
) -> None:
    for runs in compare(loss, [stage(schedule) for schedule in schedules]):
        assert [is_on for _, _, is_on in runs] == [False, False]


def test_packed_examples_are_kept_apart_by_every_stage() -> None:
    compare(pack, [stage("1f1b"), stage("interleaved")])


def test_a_loss_that_is_nan_by_itself_does_not_bring_padding_back() -> None:
    for runs in compare(give_nan_at_first, [stage("1f1b")]):
        assert [is_on for _, _, is_on in runs] == [True, True]


def test_replicas_repeat_an_update_together() -> None:
    compare(read_padding, [stage("1f1b", **zero(3)), stage("zero-bubble", **zero(1))], 4)
    compare(refuse_nan, [stage("1f1b")], 4)


def test_a_loss_that_refuses_nan_is_refused_with_sharded_weights() -> None:
    with pytest.raises(AssertionError, match=r"raised ValueError .the loss is not a number. on"):
        run_in_kept_processes(train, 4, refuse_nan, stage("1f1b", **zero(3)))


# ---- who may do without it -----------------------------------------------------------------------


class MeanBlock(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(
            hidden_states + hidden_states.mean(1, keepdim=True), *args, **options
        )


def compose_mean(choice: str) -> Removal | None:
    """A model whose last block alone needs padding."""
    model: Any = Training("llama").build_model()
    model.model.layers[-1].__class__ = MeanBlock
    settings = {**PADDED, PIPELINE: 2, "dynamic_shape": choice}
    RapidformerEngine(args=settings).compose(model, make_sgd(model), keep_rate)
    return find_fact(model, Removal)


def test_no_stage_removes_what_another_one_needs() -> None:
    assert run_in_kept_processes(compose_mean, 2, "auto") == [None, None]
    problem = r"without padding \((logits differ|in a stage on another rank)\)"
    with pytest.raises(AssertionError, match=problem):
        run_in_kept_processes(compose_mean, 2, "on")
