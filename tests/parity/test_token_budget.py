"""Micro-batches by tokens: the result of one process that sees each global batch whole."""

from __future__ import annotations

from tests.parity.harness import check, run_own_loop, under, zero

BUDGET = {"tokens_per_micro_batch": 20}


def test_in_one_process() -> None:
    unpadded = {**BUDGET, "dynamic_shape": "on"}
    cases = [*under(unpadded, "bert", "gpt2"), *under(BUDGET, "bert", run_epoch=run_own_loop)]
    check(1, cases)


def test_on_two_processes() -> None:
    layouts = [{}, zero(1), zero(3)]
    check(2, [case for layout in layouts for case in under({**BUDGET, **layout}, "gpt2")])
