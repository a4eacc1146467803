"""Offloaded activations: the same loss and gradients, bit for bit, with every other switch.

Without a GPU the copies stay in the host's memory, where they came from: everything but the streams
is as it would be on one.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rapidformer.accel.activation_offload import Lane, apply
from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.precision.autocast import apply_mixed_precision
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.config.switches import get_switch
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, TrainingError
from rapidformer.models.plan import find_plan
from rapidformer.verification.trace import Trace
from tests.parity.harness import Training, run_cases
from tests.processes import run_in_kept_processes

from .models import FAMILIES, get_gradients, get_loss, make, make_batch

CPU = torch.device("cpu")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def switch_on(model: nn.Module, *others: str) -> None:
    """In the order of the rows."""
    plan = find_plan(model)
    for granularity in {"full", "selective"} & set(others):
        apply_recompute(model, plan, granularity=granularity)
    if "compile" in others:
        torch._dynamo.reset()
        apply_compile(model, plan, backend="aot_eager")
    if "offload" in others:
        apply(SimpleNamespace(model=model, plan=plan, device=CPU))
    if "bf16" in others:
        apply_mixed_precision(model, Precision(dtype=torch.bfloat16, reason="bf16"), CPU)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_are_bit_equal(family: str) -> None:
    model = make(family, dropout=0.3)
    expected = get_gradients(model, family)
    switch_on(model, "offload")
    assert_equal(get_gradients(model, family), expected)
    assert_equal(get_gradients(copy.deepcopy(model), family), expected)


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("bert", ["full"]),
        ("llama", ["selective"]),
        ("gpt2", ["compile"]),
        ("custom", ["full", "compile", "bf16"]),
    ],
)
def test_gradients_are_bit_equal_beside_other_switches(family: str, others: list[str]) -> None:
    plain, offloaded = make(family), make(family)
    switch_on(plain, *others)
    switch_on(offloaded, *others, "offload")
    assert_equal(get_gradients(offloaded, family), get_gradients(plain, family))


@pytest.mark.parametrize("others", [[], ["full"], ["compile"]])
def test_what_blocks_save_is_sent_once_and_weights_are_not(others: list[str]) -> None:
    model = make("llama")
    switch_on(model, *others, "offload")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sent: list[torch.Tensor] = []
    send = Lane.send

    def see(self: Lane, tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)  # kept alive, so that no address comes twice
        return send(self, tensor)

    with mock.patch.object(Lane, "send", see):
        get_loss(model, "llama").backward()
    places = [(t.data_ptr(), t.shape, t.stride()) for t in sent]
    assert len(places) >= len(find_plan(model).blocks)
    assert len(set(places)) == len(places)
    assert not weights & {tensor.untyped_storage().data_ptr() for tensor in sent}


def test_a_graph_may_be_walked_twice() -> None:
    model = make("bert")
    expected = get_gradients(model, "bert")
    switch_on(model, "offload")
    model.zero_grad()
    loss = get_loss(model, "bert")
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)


def test_a_weight_that_changes_before_the_backward_pass_is_an_error() -> None:
    """Without the switch it is torch's error; hooks on saved tensors would hide it."""
    model = make("bert")
    switch_on(model, "offload")
    loss = get_loss(model, "bert")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with pytest.raises((TrainingError, RuntimeError), match=r"changed in place|modified by an in"):
        loss.backward()


def test_model_without_blocks_says_what_to_do() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"--activation-offload: no repeated blocks"):
        switch_on(model, "offload")


def test_a_cpu_run_says_that_there_is_nothing_to_offload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = RapidformerEngine(args=["--activation-offload", "--device", "cpu"])
    engine.model.compose_for_evaluation(make("bert"))
    assert "--activation-offload has no effect: it needs a CUDA device" in capsys.readouterr().err
    lines = engine.model.parallelized.switches
    assert not any(line.startswith("activation offload") for line in lines)
    engine.close()


def on_any_device() -> AbstractContextManager[Any]:
    """Inside, the row also works on a CPU, whose memory stands for a GPU's."""
    return mock.patch.dict(vars(get_switch("activation offload")), devices=())


def train(flags: list[str]) -> dict[str, np.ndarray]:
    """One update over two rows, one row a process: the gathered weights."""
    torch.set_num_threads(1)
    with on_any_device():
        engine = RapidformerEngine(
            args=["--lr", "1e-2", "--optimizer", "sgd", "--micro-batch-size", "1", "--train-iters",
                  "9", "--device", "cpu", "--log-level", "error", *flags]
        )  # fmt: skip
        model, optimizer, _ = engine.compose(model=make("llama"))
    row = engine.args.rank
    batch = {name: value[row : row + 1] for name, value in make_batch("llama").items()}
    engine.backward(model(**batch)["loss"])
    optimizer.step()
    lines = engine.model.parallelized.switches
    assert any(line.startswith("activation offload: 3") for line in lines) == (
        "--activation-offload" in flags
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # NumPy: torch's own way through a pipe needs the sender to live on.
    weights = {n: w.numpy() for n, w in get_model_state_dict(model, options=options).items()}
    engine.close()
    return weights


def train_each(layouts: list[list[str]]) -> list[dict[str, np.ndarray]]:
    return [train([*flags, *more]) for flags in layouts for more in ([], ["--activation-offload"])]


def test_sharded_and_split_weights_train_alike() -> None:
    layouts = [["--zero-3-memory-optimization"], ["--tensor-model-parallel-size", "2"]]
    sharded, offloaded, split, split_and_offloaded = run_in_kept_processes(train_each, 2, layouts)[
        0
    ]
    for expected, found in ((sharded, offloaded), (split, split_and_offloaded)):
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def train_in_stages(*layouts: dict[str, Any]) -> list[Trace]:
    with on_any_device():
        training = Training("gpt2", layers=4, rows=12)
        return run_cases([(training, settings) for settings in layouts])


def test_stages_of_a_pipeline_train_alike() -> None:
    """Zero-bubble needs what was saved twice: for gradients of inputs, then of weights."""
    settings = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"}
    layouts = settings, {**settings, "activation_offload": True}
    for one, other in run_in_kept_processes(train_in_stages, 2, *layouts):
        assert one.losses == other.losses
        for mine, others in zip(one.gradients, other.gradients, strict=True):
            assert mine.keys() == others.keys()
            for name, value in mine.items():
                np.testing.assert_array_equal(others[name], value, err_msg=name)
