"""Frozen weights in 16 bits: the same training as with autocast's own rounding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.unpad.calls import Removal
from rapidformer.engine import RapidformerEngine
from rapidformer.models.adapters import forget_base
from rapidformer.overlay import find_fact
from tests.parity.harness import SETTINGS, make_sgd, run_updates
from tests.parity.models import build_model, build_rows, collate
from tests.processes import run_in_kept_processes


def train(is_rounded: bool, settings: dict[str, Any]) -> tuple[nn.Module, list[torch.Tensor]]:
    """A few updates in bf16; returns the trained weights."""
    torch.set_num_threads(1)
    # Whatever this processor has.
    precision = Precision(dtype=torch.bfloat16, reason="of the test")
    with mock.patch("rapidformer.engine.runtime.choose_precision", return_value=precision):
        engine = RapidformerEngine(
            args={**SETTINGS, "mixed_precision": "bf16", "global_batch_size": 4, **settings}
        )
    model = build_model("gpt2-lora")
    if not is_rounded:
        forget_base(model)
    rows = build_rows("gpt2-lora", 8)
    loader = engine.data.build_loader(rows, collate, shuffle=False, is_training=True)
    engine.compose(model, make_sgd(model))
    model.train()
    run_updates(engine, model, loader)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    weights = engine.checkpoints.gather_weights()
    return model, [weights[name] for name in sorted(trained) if name in weights]


def check_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Far closer than bf16 is to fp32: matrix products on a CPU may differ in their last bit."""
    assert found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_rounded_frozen_weights_train_the_same_adapters_in_less_memory() -> None:
    whole, expected = train(False, {})
    rounded, found = train(True, {})
    check_close(found, expected)
    sizes = [sum(p.nbytes for p in m.parameters() if not p.requires_grad) for m in (whole, rounded)]
    assert sizes[1] < 0.6 * sizes[0]
    kinds = {name: p.dtype for name, p in rounded.named_parameters()}
    assert kinds["transformer.h.0.attn.c_attn.base_layer.weight"] == torch.bfloat16
    assert kinds["transformer.h.0.attn.c_attn.lora_A.default.weight"] == torch.float32
    assert kinds["transformer.wte.base_layer.weight"] == torch.float32, "an embedding, and tied"
    assert kinds["transformer.ln_f.weight"] == torch.float32
    assert all(find_fact(model, Removal) for model in (whole, rounded)), "without padding, too"


def run_sharded() -> list[list[torch.Tensor]]:
    return [train(rounds, {"zero_3_memory_optimization": True})[1] for rounds in (False, True)]


def test_rounded_frozen_weights_are_sharded_too() -> None:
    expected, found = run_in_kept_processes(run_sharded, 2)[0]
    check_close(found, expected)
