"""What users do in their own loops: exact under every layout, or refused with a reason."""

from __future__ import annotations

import torch

from rapidformer.dist.whole import join_whole
from tests.parity.own_loop import Loop, assert_same, zero

GPT2 = {"model_name": "gpt2"}
VALIDATION = 100
"""The number of a batch that is never trained on."""


# ---- a look at validation data, and weights changed by hand --------------------------------------


def look_before_the_step(loop: Loop) -> None:
    for number in range(3):
        loop.engine.backward(loop.compute_loss(number))
        with torch.no_grad():
            loop.note_mean(loop.compute_loss(VALIDATION))
        loop.engine.step()
    with torch.no_grad():
        loop.note_mean(loop.compute_loss(VALIDATION))


def look_with_gradients(loop: Loop) -> None:
    """Without ``no_grad``, and in training mode: nothing tells the pass from one of training."""
    for number in range(3):
        loop.engine.backward(loop.compute_loss(number))
        loop.note_mean(loop.compute_loss(VALIDATION))
        loop.engine.step()
    loop.values.append(sum(float(join_whole(p).abs().sum()) for p in loop.model.parameters()))


def clamp_after_a_look(loop: Loop) -> None:
    for number in range(3):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()
        loop.model.eval()
        loop.note_mean(loop.compute_loss(VALIDATION))
        loop.model.train()
        for parameter in loop.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def clamp_while_accumulating(loop: Loop) -> None:
    """ZeRO-1 and ZeRO-2 keep weights gathered between the micro-batches of an update."""
    for number in range(2):
        for micro_batch in range(2):
            with loop.engine.accumulate(is_last=micro_batch == 1):
                loop.engine.backward(loop.compute_loss(2 * number + micro_batch))
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.clamp_(-0.1, 0.1)
        loop.engine.step()


def test_looks_and_changes_by_hand_between_updates() -> None:
    cases = [look_before_the_step, look_with_gradients, clamp_after_a_look]
    layouts = [zero(1), zero(2), zero(3), zero(2, cpu_offload=True)]
    runs = [(case, layout, GPT2) for case in cases for layout in layouts]
    # Changes to gathered weights are copied to shards of uneven sizes, some of them empty.
    runs += [(clamp_while_accumulating, zero(stage), {}) for stage in (1, 2, 3)]
    assert_same(runs)
