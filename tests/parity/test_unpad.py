"""Without padding, under every layout that allows it: the result of one padded process."""

from __future__ import annotations

from tests.parity.harness import check, under, zero

ON = {"dynamic_shape": "on"}


def test_in_one_process() -> None:
    check(1, under(ON, "bert", "bert-mlm", "gpt2", "llama", "t5"))


def test_on_two_processes() -> None:
    layouts = [{}, zero(1), zero(3), zero(3, checkpoint_activations=True)]
    cases = [case for layout in layouts[:3] for case in under({**ON, **layout}, "bert", "gpt2")]
    check(2, cases + under({**ON, **layouts[3]}, "bert", "t5"))
