"""The loss from hidden states, under every layout that uses it: the result of one plain process."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

from rapidformer.engine import RapidformerEngine
from tests.parity.harness import PIPELINE, UNPADDED, check, under, zero

ON = {"fused_loss": "on"}
MODELS = ("gpt2", "bert-mlm", "t5", "llama")


def test_in_one_process() -> None:
    settings = {**ON, **UNPADDED}
    check(
        1, under(settings, *MODELS) + under({**settings, "checkpoint_activations": True}, "llama")
    )


def test_under_every_layout_of_two_processes() -> None:
    settings = {**ON, **UNPADDED}
    cases = [case for stage in (1, 2, 3) for case in under(zero(stage, **settings), "gpt2")]
    cases += [*under(settings, "gpt2"), *under(ON, "t5"), *under(zero(3, **ON), "t5")]
    check(2, cases + under({**settings, PIPELINE: 2}, "llama"))


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
