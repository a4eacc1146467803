"""Experts shared over processes == one process: losses, every gradient, updated weights, ties.

A mixture's balancing loss is one of a micro-batch, so the reference accumulates the micro-batches
that the processes have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.accel.expert.parallel import plan_route
from rapidformer.dist import mpu
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.models.gpt import GPTForCausalLM
from rapidformer.verification.recorder import collect_gradients
from tests.parity.harness import (
    PADDED,
    UNPADDED,
    Case,
    Settings,
    Training,
    check,
    keep_rate,
    make_adamw,
    make_sgd,
    under,
)
from tests.parity.limits import get_bytes
from tests.parity.models import build_model, sharpen
from tests.parity.resuming import check_route
from tests.processes import run_in_kept_processes

ROWS = 4
EXPERTS: Settings = {
    "expert_model_parallel_size": 2, "global_batch_size": ROWS, "micro_batch_size": 1,
}  # fmt: skip


def under_experts(settings: Settings, *models: str, updates: int = 2, **more: Any) -> list[Case]:
    """Beside a bare loop over single rows."""
    return under(
        settings, *models, rows=updates * ROWS, global_batch_size=ROWS, is_by_row=True, **more
    )


def _count_bytes(name: str) -> tuple[int, int]:
    """Of the whole model, and of its experts."""
    model = build_model(name)
    sizes = {key: p.numel() * p.element_size() for key, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for key, n in sizes.items() if ".experts." in key)


def test_two_processes_that_share_experts_equal_one() -> None:
    """With fused AdamW, which wants tensors of one kind, clipping, and rows without any label."""
    names = ("gpt-moe", "mixtral")
    settings = {**EXPERTS, **UNPADDED}
    cases = under_experts(settings, *names, updates=10, make_optimizer=make_adamw)
    for name, traces in zip(names, check(2, cases), strict=True):
        whole, experts = _count_bytes(name)
        assert all(get_bytes(trace) == whole - experts // 2 for trace in traces)


def test_groups_that_share_experts_under_data_parallelism() -> None:
    """Experts are summed over those that hold the same, everything else over all four."""
    check(4, under_experts(EXPERTS, "gpt-moe", "mixtral"))


def test_shared_experts_under_sharding() -> None:
    settings = {**EXPERTS, "zero_3_memory_optimization": True}
    (traces,) = check(4, under_experts(settings, "gpt-moe", make_optimizer=make_adamw))
    whole, _ = _count_bytes("gpt-moe")
    assert all(get_bytes(trace) < 0.26 * whole for trace in traces)


def test_shared_experts_and_shared_sequences() -> None:
    """A mixture's loss is one over all tokens of the row, of which each process has a part."""
    settings = {**EXPERTS, "context_parallel_size": 2, "checkpoint_activations": True}
    check(2, under_experts({**settings, "zero_2_memory_optimization": True}, "gpt-moe"))


# ---- rows on their way ---------------------------------------------------------------------------


def _send_rows() -> tuple[list[list[float]], list[int], list[list[float]]]:
    engine = RapidformerEngine(args={**PADDED, **EXPERTS})
    rank = mpu.get_expert_model_parallel_rank()
    assert mpu.get_expert_model_parallel_world_size() == 2
    group = mpu.get_expert_model_parallel_group()
    assert group is not None
    # Four experts, two of each process; nobody has rows for the third, the second sends one alone.
    counts = torch.tensor([[2, 1, 0, 0], [0, 1, 0, 0]][rank])
    rows = torch.arange(float(counts.sum()))[:, None] + 10 * rank
    route = plan_route(counts, group)
    arrived = route.send(rows)
    returned = route.send_back(arrived * 2)
    engine.close()
    return arrived.tolist(), route.counts.tolist(), returned.tolist()


def test_rows_reach_the_owners_of_their_experts_and_come_back_in_order() -> None:
    first, second = run_in_kept_processes(_send_rows, 2)
    assert first == ([[0.0], [1.0], [2.0], [10.0]], [2, 2], [[0.0], [2.0], [4.0]])
    assert second == ([], [0, 0], [[20.0]])


def _starve(name: str) -> dict[str, np.ndarray]:
    """Rows of one token: most experts get nothing, on one process none does."""
    engine = RapidformerEngine(args={**PADDED, **EXPERTS, "global_batch_size": 2})
    model: Any = build_model(name)
    engine.compose(model, make_sgd(model), keep_rate)
    ids = torch.tensor([[5, 5]])
    engine.backward(model.train()(input_ids=ids, labels=ids).loss)
    gradients = collect_gradients(model)
    engine.step()
    _check_forward_in_a_compiled_block(name, model)
    engine.close()
    return gradients


def _check_forward_in_a_compiled_block(name: str, model: Any) -> None:
    """There, the module's call has been compiled away: nothing but its forward runs."""
    if name == "mixtral":
        experts = model.model.layers[0].mlp.experts
        given = (torch.ones(1, 32), torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]]))
    else:
        experts = model.layers[1].feed_forward.experts
        given = (torch.ones(2, 32), torch.tensor([1, 1, 1, 2], dtype=torch.int32))
    assert torch.equal(experts.forward(*given), experts(*given))


@pytest.mark.parametrize("name", ["mixtral", "gpt-moe"])
def test_experts_without_rows_do_not_hold_up_the_others(name: str) -> None:
    first, second = run_in_kept_processes(_starve, 2, name)
    experts = [key for key in first if ".experts." in key]
    assert experts
    for key in experts:
        assert np.array_equal(first[key], second[key])
        assert np.abs(first[key]).sum() > 0


# ---- checkpoints, exports, generating ------------------------------------------------------------


def test_runs_continue_from_one_layout_of_experts_to_another(tmp_path: Path) -> None:
    """Exports are whole."""
    training = Training("gpt-moe", rows=ROWS, global_batch_size=ROWS)
    route = [(2, EXPERTS), (4, {**EXPERTS, "zero_3_memory_optimization": True}), (1, {})]
    base = {"micro_batch_size": 1, "train_iters": 90}
    # Mixtures of different sizes have no equivalent in transformers.
    check_route(training, route, GPTForCausalLM, tmp_path, base, is_exported=False)


def _generate(settings: dict[str, Any]) -> list[list[int]]:
    """Every process has another prompt, and is done at another time."""
    engine = RapidformerEngine(args={**PADDED, **settings, "train_iters": 3})
    model: Any = build_model("mixtral")
    sharpen(model)
    engine.compose(model)
    answers = []
    for prompt in ([5, 6, 7], [9, 10])[mpu.get_data_parallel_rank() :][: 1 if settings else 2]:
        ids = model.eval().generate(
            torch.tensor([prompt]), max_length=9, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        answers.append(ids[0].tolist())
    engine.close()
    return answers


def test_processes_that_share_experts_generate_the_same_text() -> None:
    first, second = run_in_kept_processes(_generate, 2, EXPERTS)
    assert [*first, *second] == _generate({})


# ---- what cannot work ----------------------------------------------------------------------------


def _compose(names: list[str], settings: dict[str, Any]) -> list[str]:
    messages = []
    for name in names:
        try:
            engine = RapidformerEngine(args={**PADDED, **settings, "train_iters": 3})
            model = build_model(name)
            is_late = name == "mixtral" and settings["expert_model_parallel_size"] == 2
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.compose(model, optimizer, lr_scheduler=keep_rate(optimizer) if is_late else None)
            messages.append("composed")
        except RapidformerError as error:
            messages.append(str(error))
    return messages


def test_experts_that_cannot_be_shared_are_refused_with_the_reason() -> None:
    three = {"expert_model_parallel_size": 3, "global_batch_size": 3, "micro_batch_size": 1}
    messages = run_in_kept_processes(_compose, 3, ["gpt-moe", "llama"], three)[0]
    assert messages[0] == (
        "--expert-model-parallel-size 3 does not divide the 4 experts of "
        "layers.1.feed_forward.experts of GPTForCausalLM: use 1, 2 or 4."
    )
    assert "LlamaForCausalLM has no experts to distribute" in messages[1]
    late = run_in_kept_processes(_compose, 2, ["mixtral"], EXPERTS)[0]
    assert "pass compose() a function, lr_scheduler_fn=" in late[0]
