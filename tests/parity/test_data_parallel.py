"""One process == several, sharded or not, accumulated or not, on rows of unequal lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rapidformer import RapidformerEngine
from rapidformer.data.collate import PadCollator
from rapidformer.optim.observer import observe_runs
from rapidformer.verification.recorder import Recorder
from rapidformer.verification.trace import Trace
from tests.parity.harness import (
    UNPADDED,
    Training,
    check,
    check_case,
    keep_rate,
    make_sgd,
    run_own_loop,
)
from tests.parity.limits import WHOLE_LIMITS
from tests.parity.models import SAMPLES
from tests.processes import run_in_kept_processes

EPOCHS = 4
"""Of three updates each: the promise is made for ten. One model of a test keeps it; what another
architecture could get wrong shows in two updates, of which the last is a smaller one."""
FEW = 22


def _describe(model: str, make_optimizer: Any = make_sgd, epochs: int = 1) -> Training:
    """Of two updates, unless it has several epochs: of three each."""
    return Training(
        f"small-{model}", make_optimizer=make_optimizer, rows=SAMPLES if epochs > 1 else FEW,
        global_batch_size=16, epochs=epochs, is_shuffled=True, run_epoch=run_own_loop,
    )  # fmt: skip


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Adam's default epsilon turns round-off in gradients near zero into whole steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def _check(
    models: str | list[str],
    world_size: int,
    make_optimizer: Any = make_sgd,
    *,
    epochs: int = EPOCHS,
    **settings: Any,
) -> None:
    """The first model is trained for ``epochs`` epochs, the others for a short one."""
    first, *others = [models] if isinstance(models, str) else models
    trainings = [_describe(first, make_optimizer, epochs)]
    trainings += [_describe(name, make_optimizer) for name in others]
    check(world_size, [(training, settings) for training in trainings], WHOLE_LIMITS)


def _run_the_readmes_loop() -> Trace:
    """The loop of the README's first page, word for word."""
    torch.set_num_threads(1)
    recorder = Recorder()
    with observe_runs(recorder):
        training = _describe("gpt2")
        engine = RapidformerEngine(args=training.get_settings({**UNPADDED, "micro_batch_size": 4}))
        model: Any = training.build_model()
        loader = DataLoader(
            training.build_rows(),  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            collate_fn=PadCollator(),
        )
        model, optimizer, lr_scheduler, train_dataloader = engine.compose(
            model=model,
            optimizer=make_sgd(model),
            lr_scheduler_fn=keep_rate,
            train_dataloader=loader,
        )
        for batch in train_dataloader:
            loss = model(**batch).loss
            engine.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        return recorder.finish()


def test_the_readmes_loop_is_exact_for_unequal_label_counts() -> None:
    """Two processes, two micro-batches each, without a word about weights."""
    traces = run_in_kept_processes(_run_the_readmes_loop, 2)
    check_case(_describe("gpt2"), traces, WHOLE_LIMITS)


MODELS = ["gpt2", "bert", "bert-mlm", "t5", "llama", "plain"]


def test_accumulation_equals_one_big_batch() -> None:
    _check(MODELS, 1, epochs=1, micro_batch_size=2)


def test_two_processes_equal_one() -> None:
    _check(MODELS, 2, micro_batch_size=4, **UNPADDED)


def test_four_processes_equal_one() -> None:
    _check("bert-mlm", 4, epochs=1, micro_batch_size=2)


def test_adamw_on_two_processes() -> None:
    _check("gpt2", 2, make_adamw, micro_batch_size=4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_equals_one(stage: int) -> None:
    """Ten updates where weights are gathered for each; the others differ in what is kept."""
    switch = {f"zero_{stage}_memory_optimization": True}
    epochs = EPOCHS if stage == 3 else 1
    _check(["gpt2", "bert-mlm", "t5", "plain"], 2, epochs=epochs, micro_batch_size=4, **switch)


def test_fsdp_is_zero_3_on_four_processes() -> None:
    _check("llama", 4, make_adamw, epochs=1, micro_batch_size=2, fsdp_memory_optimization=True)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_changes_nothing(granularity: str) -> None:
    _check("gpt2", 1, epochs=1, micro_batch_size=4, recompute_granularity=granularity)


def test_recompute_under_sharding() -> None:
    switches = {"checkpoint_activations": True, "zero_3_memory_optimization": True}
    _check("t5", 2, epochs=1, micro_batch_size=4, **switches)


def test_compiled_blocks_change_nothing() -> None:
    """Their backward passes are compiled, too, in tests/accel/test_recompute.py."""
    _check("bert", 1, epochs=1, micro_batch_size=4, compile=True, compile_backend="eager")
