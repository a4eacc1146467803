"""The loss from hidden states, under every layout that uses it: the result of one plain process."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

from rapidformer.engine import RapidformerEngine
from tests.parity.harness import PIPELINE, check, under, zero

ON = {"fused_loss": "on"}
MODELS = ("gpt2", "bert-mlm", "t5", "llama")


def test_in_one_process() -> None:
    check(1, under(ON, *MODELS) + under({**ON, "checkpoint_activations": True}, "llama"))


def test_under_every_layout_of_two_processes() -> None:
    layouts = [{}, zero(1), zero(2), zero(3)]
    cases = [case for layout in layouts for case in under({**ON, **layout}, "gpt2", "t5")]
    check(2, cases + under({**ON, PIPELINE: 2}, "llama"))


def run_own_loss(engine: RapidformerEngine, model: nn.Module, loader: Any) -> None:
    """A loss over ``outputs.logits``, after the forward pass: sharded weights are gone by then."""
    for batch in loader:
        labels = batch.pop("labels")
        logits = model(**batch)["logits"][:, :-1]
        engine.backward(functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
        engine.step()


def test_a_loss_over_the_outputs() -> None:
    own = {"run_epoch": run_own_loss}
    check(2, [c for layout in ({}, zero(3)) for c in under({**ON, **layout}, "gpt2", **own)])
